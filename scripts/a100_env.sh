# The environment of a job on A100 nodes without a file of their own, sourced by a100.sbatch.
# Sources: NCCL = docs.nvidia.com, NCCL user guide, page "Environment Variables", read 2026-11-26.
# A variable that is set before sbatch keeps its value. At start-up the program compares the variables
# of every rank with conf/cluster/a100_80g.yaml and reports differences. Not tested on A100 nodes.
# shellcheck shell=bash

# No network interfaces are set here, because their names differ between clusters. If NCCL or gloo
# chooses a wrong one, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME before sbatch. With InfiniBand,
# NCCL_NET=IB refuses TCP (NCCL).

# Let a NIC read the memory of a GPU that is on the same PCI host bridge (NCCL).
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"

# Use the cores next to each rank's GPU. The GPUs of a DGX A100 are at the NUMA domains 3, 1, 7 and 5
# (NVIDIA/nccl#1505, 2024-11), and Slurm would give the first ranks the cores of the domains 0 and 1.
# shellcheck disable=SC2034 # train_job.sh uses it
rank_command=(bash "${BASH_SOURCE[0]%/*}/near_gpu.sh")
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
