# Settings that all sites have in common, sourced at the end of every *_env.sh.
# Sources: NCCL = docs.nvidia.com, NCCL user guide, page "Environment Variables", read 2026-11-26.
# shellcheck shell=bash

# Write the warnings of NCCL and RCCL to the output. Without them, even the reason of a failed start
# is lost (NCCL).
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Compile kernels in the rank itself. By default inductor starts one process per core, at most 32, in
# each rank (torch/_inductor/config.py, decide_compile_threads; pytorch#191385, 2026-07): on a node
# with 8 ranks these are more processes than cores, and on AMD GPUs each holds a context of the GPU.
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
# Random text of this job, for the port and the keys of the store of its ranks (docs/security.md).
export FRONTIER_LLM_SECRET="${FRONTIER_LLM_SECRET:-$(od -An -N16 -tx8 /dev/urandom | tr -d ' ')}"
# A folder on a disk, or in the memory, of each node.
export FRONTIER_LLM_NODE_LOCAL="${FRONTIER_LLM_NODE_LOCAL:-/tmp/frontier_llm-$USER}"
# The folder of Triton's compiled kernels. By default all ranks of all nodes use one folder in $HOME,
# which some sites mount read-only on compute nodes.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$FRONTIER_LLM_NODE_LOCAL/triton}"
# The packed virtual environment: `make archive`, or `tar --create --file=venv.tar .venv`.
export FRONTIER_LLM_ARCHIVE="${FRONTIER_LLM_ARCHIVE:-$PWD/venv.tar}"
