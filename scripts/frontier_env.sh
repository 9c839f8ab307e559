# The environment of a job on Frontier, sourced by frontier.sbatch. A comment gives the reason for
# each variable and its source: OLCF = OLCF's user guide and its PyTorch page; HPE = HPE's advice,
# quoted in olcf-user-docs.
# A variable that is set before sbatch keeps its value. If a module sets it, that value is used, and
# otherwise the value given here. At start-up the program compares the variables of every rank with
# conf/cluster/frontier_mi250x.yaml and reports differences. Not tested on Frontier.
# shellcheck shell=bash

# Modules may overwrite what was set before sbatch, so remember it and restore it after the modules.
given=$(export -p | grep -E '^declare -x (NCCL_|GLOO_|HSA_|FI_|MIOPEN_)' || true)
# The compilers and libraries that torch's ROCm build needs at run time. The ROCm version must be
# the one that torch in .venv was built for (OLCF names this set together with torch 2.10.0).
module load PrgEnv-gnu/8.7.0 cpe/26.03 "rocm/${FRONTIER_LLM_ROCM:-7.1.1}" craype-accel-amd-gfx90a
# Needed with a programming environment that is not the default (OLCF).
export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# RCCL over Slingshot's own protocol; without this plugin RCCL falls back to TCP (OLCF).
module load rccl-net-plugin
eval "$given"

# Slingshot's four NICs; RCCL must not use a management interface (OLCF).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}"
# The same for gloo, which accepts one interface.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-hsn0}"
# Each package has a NIC: let RCCL send from a GCD's own memory through any of them (OLCF).
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"
# Let a ring use different NICs on different nodes, so that all four links are used (HPE, OLCF).
export NCCL_CROSS_NIC="${NCCL_CROSS_NIC:-1}"
# Let a GCD write to another GCD without a copy through the host (OLCF).
export HSA_FORCE_FINE_GRAIN_PCIE="${HSA_FORCE_FINE_GRAIN_PCIE:-1}"
# How libfabric detects freed memory; the default, memhooks, can deadlock RCCL (HPE, OLCF).
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-kdreg2}"
# A rendezvous protocol without get operations, which --network=disable_rdzv_get requires (OLCF).
export FI_CXI_RDZV_PROTO="${FI_CXI_RDZV_PROTO:-alt_read}"
# Do not register host memory with the GPU driver for each message: it costs more than it saves (OLCF).
export FI_CXI_DISABLE_HOST_REGISTER="${FI_CXI_DISABLE_HOST_REGISTER:-1}"
# Queues that are long enough for thousands of ranks; the defaults overflow (HPE).
export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE:-131072}"
export FI_CXI_DEFAULT_TX_SIZE="${FI_CXI_DEFAULT_TX_SIZE:-2048}"
# Match messages in hardware, and in software once its lists are full, instead of failing (OLCF).
export FI_CXI_RX_MATCH_MODE="${FI_CXI_RX_MATCH_MODE:-hybrid}"
# Put MIOpen's caches on the node. By default every rank locks the same file in $HOME (OLCF).
export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-/tmp/miopen-$USER}"
export MIOPEN_CUSTOM_CACHE_DIR="${MIOPEN_CUSTOM_CACHE_DIR:-/tmp/miopen-$USER}"
# Put Triton's cache there, too. By default it is in $HOME, to which compute nodes cannot write.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$USER}"

# The NVMe of each node, given by --constraint=nvme (OLCF).
export FRONTIER_LLM_NODE_LOCAL="${FRONTIER_LLM_NODE_LOCAL:-/mnt/bb/$USER}"
# The packed virtual environment: `make archive`, or `tar --create --file=venv.tar .venv`.
export FRONTIER_LLM_ARCHIVE="${FRONTIER_LLM_ARCHIVE:-$PWD/venv.tar}"
