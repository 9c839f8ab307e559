# The environment of a job on JUWELS Booster, sourced by juwels.sbatch. Not tested on JUWELS.
# Sources: JSC = apps.fz-juelich.de, "JUWELS Booster Overview", read 2026-11-26; itwinai = the set-up
# for JSC's machines in github.com/interTwin-eu/itwinai (Stages/2025), read 2026-11-26; NCCL =
# docs.nvidia.com, NCCL user guide, page "Environment Variables", read 2026-11-26.
# A variable that is set before sbatch keeps its value. The program compares the variables with
# conf/cluster/juwels_a100_40g.yaml.
# shellcheck shell=bash

# The Python that .venv was created with. Unverified for other stages (itwinai).
module load "Stages/${FRONTIER_LLM_STAGE:-2025}" GCC Python

# Use InfiniBand, which NCCL supports without a plugin (JSC: HDR), and end with an error instead of
# falling back to TCP (NCCL).
export NCCL_NET="${NCCL_NET:-IB}"
# IP over InfiniBand for NCCL's and gloo's first contact (itwinai).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-ib0}"
# The first node's name on InfiniBand, which has an "i" at its end. Its other name cannot be reached
# from other cells of the machine (itwinai).
read -r first < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") || true
export MASTER_ADDR="${MASTER_ADDR:-${first}i}"

# One hardware thread per core. JSC's Slurm already chooses the cores next to the GPUs, in NUMA
# domains 3, 1, 7 and 5 (co-design.pop-coe.eu, "GPU affinity", read 2026-11-26).
# shellcheck disable=SC2034 # train_job.sh uses it
rank_options=(--threads-per-core=1)
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
