# The environment of a job on Leonardo's Booster, sourced by leonardo.sbatch. Not tested on Leonardo.
# Sources: CINECA = docs.hpc.cineca.it, page "Leonardo", read 2026-11-26; NCCL = docs.nvidia.com, NCCL
# user guide, page "Environment Variables", read 2026-11-26.
# A variable that is set before sbatch keeps its value. The program compares the variables with
# conf/cluster/leonardo_a100_64g.yaml. No module is loaded: torch's wheels contain CUDA and NCCL.
# shellcheck shell=bash

# Use InfiniBand, which NCCL supports without a plugin (CINECA: HDR), and end with an error instead of
# falling back to TCP (NCCL).
export NCCL_NET="${NCCL_NET:-IB}"
# IP over InfiniBand for NCCL's and gloo's first contact. Unverified: from public job scripts.
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-ib0}"

# Use the cores next to each rank's GPU.
# shellcheck disable=SC2034 # train_job.sh uses it
rank_command=(bash "${BASH_SOURCE[0]%/*}/near_gpu.sh")
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
