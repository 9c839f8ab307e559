# The environment of a job on Perlmutter's GPU nodes, sourced by perlmutter.sbatch. Not tested there.
# Sources: NERSC = github.com/NERSC/podman-hpc, etc/modules.d/nccl.yaml, read 2026-11-26 (NCCL 2.15
# plugin): the settings that NERSC gives to NCCL in containers; HPE as in slingshot_env.sh.
# A variable that is set before sbatch keeps its value, otherwise that of a module, otherwise the
# value given here. The program compares them with conf/cluster/perlmutter_a100_40g.yaml.
# shellcheck shell=bash

given=$(export -p | grep -E '^declare -x (NCCL_|GLOO_|FI_)' || true)
# NCCL with the libfabric plugin. Unverified: the module's name is from public job scripts of 2025.
module load "${FRONTIER_LLM_NCCL_MODULE:-nccl}"
eval "$given"

# Every interface whose name begins with hsn (NERSC).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn}"
# Let a NIC read the memory of a GPU on the same PCI host bridge (HPE; NERSC's file misspells the name
# as CCL_NET_GDR_LEVEL, NERSC/podman-hpc#136, 2025-01).
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"

# Every rank sees all GPUs, and uses the one with its local number on the cores next to it. Hiding the
# others with --gpus-per-task or --gpu-bind broke CUDA's messages between processes on Perlmutter
# (E3SM-Project/E3SM#4834, 2022).
# shellcheck disable=SC2034 # train_job.sh uses it
rank_command=(bash "${BASH_SOURCE[0]%/*}/near_gpu.sh")
# shellcheck source=scripts/slingshot_env.sh
source "${BASH_SOURCE[0]%/*}/slingshot_env.sh"
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
