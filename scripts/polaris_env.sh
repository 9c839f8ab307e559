# The environment of a job on Polaris, sourced by polaris.pbs. Not tested on Polaris.
# Sources: ALCF = docs.alcf.anl.gov, Polaris, pages "NCCL" (plugin 1.9.1, state of 2024-10-29) and
# "PyTorch", read 2026-11-26; HPE as in slingshot_env.sh.
# A variable that is set before keeps its value. The program compares the variables with
# conf/cluster/polaris_a100_40g.yaml.
# shellcheck shell=bash

# The nodes of the job. slingshot_env.sh reads their number.
SLURM_JOB_NUM_NODES=$(sort --unique "$PBS_NODEFILE" | wc -l)
# The plugin for NCCL and the library that it needs (ALCF).
libraries=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

# Unverified: ALCF does not name the two interfaces, which are called hsn on HPE's systems (HPE).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn}"
# Let a NIC read the memory of a GPU on the same PCI host bridge (ALCF, HPE).
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"
# ALCF's best set-up has it. It allows algorithms that the network computes (NCCL's user guide).
export NCCL_COLLNET_ENABLE="${NCCL_COLLNET_ENABLE:-1}"
# 8 of 32 cores for each of 4 ranks. Slurm would tell the program, PBS does not.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# The two SSDs of each node (ALCF, machine overview).
export FRONTIER_LLM_NODE_LOCAL="${FRONTIER_LLM_NODE_LOCAL:-/local/scratch/frontier_llm-$USER}"

# shellcheck source=scripts/slingshot_env.sh
source "${BASH_SOURCE[0]%/*}/slingshot_env.sh"
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
