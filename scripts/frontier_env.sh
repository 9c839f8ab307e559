# The environment of a job on Frontier, sourced by frontier.sbatch. Not tested on Frontier.
# Sources: OLCF = docs.olcf.ornl.gov, "PyTorch on Frontier", state of 2026-07-22 (cpe/26.03, ROCm
# 7.1.1, torch 2.10.0); HPE as in slingshot_env.sh.
# A variable that is set before sbatch keeps its value. If a module sets it, that value is used, and
# otherwise the value given here. At start-up the program compares the variables of every rank with
# conf/cluster/frontier_mi250x.yaml and reports differences.
# shellcheck shell=bash

# Modules may overwrite what was set before sbatch, so remember it and restore it after the modules.
given=$(export -p | grep -E '^declare -x (NCCL_|GLOO_|HSA_|FI_|MIOPEN_)' || true)
# The compilers and libraries that torch's ROCm build needs at run time. The ROCm version must be
# the one that torch in .venv was built for (OLCF names this set together with torch 2.10.0). The
# module of miniforge is only needed to create .venv.
module load PrgEnv-gnu/8.7.0 cpe/26.03 "rocm/${FRONTIER_LLM_ROCM:-7.1.1}" craype-accel-amd-gfx90a
# Needed with a programming environment that is not the default (OLCF).
export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# RCCL over Slingshot's own protocol; without this plugin RCCL falls back to TCP (OLCF).
module load rccl-net-plugin
eval "$given"

# Let RCCL send from a GCD's own memory through any NIC of the node (OLCF, HPE). LUMI advises against
# it with ROCm 7 (lumi_env.sh); `frontier-llm doctor --network` measures both.
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"
# The name by which OLCF forces RCCL to use the plugin.
if [ "${SLURM_JOB_NUM_NODES:-2}" != 1 ]; then export NCCL_NET="${NCCL_NET:-OFI}"; fi
# Let a GCD write to another GCD without a copy through the host (OLCF, HPE).
export HSA_FORCE_FINE_GRAIN_PCIE="${HSA_FORCE_FINE_GRAIN_PCIE:-1}"
# The default on Frontier (OLCF).
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-kdreg2}"
# The alternative rendezvous protocol, which is faster at scale. It also needs
# --network=disable_rdzv_get (OLCF).
export FI_CXI_RDZV_PROTO="${FI_CXI_RDZV_PROTO:-alt_read}"
# Send no data before the receiver is ready, and all messages through that protocol. OLCF strongly
# recommends them, because results and speed of large jobs depend on them (OLCF, HPE).
export FI_CXI_RDZV_EAGER_SIZE="${FI_CXI_RDZV_EAGER_SIZE:-0}"
export FI_CXI_RDZV_THRESHOLD="${FI_CXI_RDZV_THRESHOLD:-0}"
export FI_CXI_RDZV_GET_MIN="${FI_CXI_RDZV_GET_MIN:-0}"
# Put MIOpen's caches on the node (OLCF). By default every rank locks the same file in $HOME. The job
# script creates the folder on every node.
export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-/tmp/miopen-$USER}"
export MIOPEN_CUSTOM_CACHE_DIR="${MIOPEN_CUSTOM_CACHE_DIR:-/tmp/miopen-$USER}"
# The NVMe of each node, given by --constraint=nvme (OLCF).
export FRONTIER_LLM_NODE_LOCAL="${FRONTIER_LLM_NODE_LOCAL:-/mnt/bb/$USER}"

# Give each rank the GCD next to its cores (OLCF).
# shellcheck disable=SC2034 # train_job.sh uses it
rank_options=(--gpus-per-task=1 --gpu-bind=closest)
# shellcheck source=scripts/slingshot_env.sh
source "${BASH_SOURCE[0]%/*}/slingshot_env.sh"
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
