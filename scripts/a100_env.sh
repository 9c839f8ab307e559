# The environment of a job on A100 nodes; sourced by a100.sbatch. Each variable: why, and who says so.
# NCCL = NVIDIA's NCCL user guide, page "Environment Variables".
# A value set before sbatch wins. At start-up the program compares all of them on every rank with
# conf/cluster/a100_80g.yaml and says where they differ. Not tried by us on A100 nodes themselves.
# shellcheck shell=bash

# No network interfaces are named: they differ from cluster to cluster. Where NCCL or gloo takes a
# wrong one, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME before sbatch.

# Warnings of NCCL in the job's output: an unset value hides even the reason of a failed start (NCCL).
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# A NIC beside each GPU: let NCCL send from its memory where both hang on one PCI bridge (NCCL).
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"

# A disk, or memory, of the node.
export FRONTIER_LLM_NODE_LOCAL="${FRONTIER_LLM_NODE_LOCAL:-/tmp/frontier_llm-$USER}"
# Triton's compiled kernels: by default all ranks of all nodes compile into one folder in $HOME.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$FRONTIER_LLM_NODE_LOCAL/triton}"
# The packed virtual environment: make archive.
export FRONTIER_LLM_ARCHIVE="${FRONTIER_LLM_ARCHIVE:-$PWD/venv.tar}"
