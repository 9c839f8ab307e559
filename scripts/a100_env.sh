# The environment of a job on A100 nodes, sourced by a100.sbatch. A comment gives the reason for
# each variable and its source: NCCL = NVIDIA's NCCL user guide, page "Environment Variables".
# A variable that is set before sbatch keeps its value. At start-up the program compares the variables
# of every rank with conf/cluster/a100_80g.yaml and reports differences. Not tested on A100 nodes.
# shellcheck shell=bash

# No network interfaces are set here, because their names differ between clusters. If NCCL or gloo
# chooses a wrong one, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME before sbatch.

# Write NCCL's warnings to the output. Without them, even the reason of a failed start is lost (NCCL).
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Let a NIC read the memory of a GPU that is on the same PCI host bridge (NCCL).
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"

# A folder on a disk, or in the memory, of each node.
export FRONTIER_LLM_NODE_LOCAL="${FRONTIER_LLM_NODE_LOCAL:-/tmp/frontier_llm-$USER}"
# The folder of Triton's compiled kernels. By default all ranks of all nodes use one folder in $HOME.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$FRONTIER_LLM_NODE_LOCAL/triton}"
# The packed virtual environment: `make archive`, or `tar --create --file=venv.tar .venv`.
export FRONTIER_LLM_ARCHIVE="${FRONTIER_LLM_ARCHIVE:-$PWD/venv.tar}"
