# The environment of a job on LUMI-G, sourced by lumi.sbatch. Not tested on LUMI.
# Sources: LUMI = docs.lumi-supercomputer.eu, "LUMI-G example batch scripts" and "Distribution and
# binding", read 2026-11-26; AI guide = github.com/Lumi-supercomputer/LUMI-AI-Guide, chapter 5, state
# of 2026-05 (ROCm 7.0); HPE as in slingshot_env.sh.
# A variable that is set before sbatch keeps its value, otherwise that of a module, otherwise the
# value given here. The program compares them with conf/cluster/lumi_mi250x.yaml.
# shellcheck shell=bash

given=$(export -p | grep -E '^declare -x (NCCL_|GLOO_|HSA_|FI_|MIOPEN_)' || true)
# Unverified: LUMI's pages describe containers and name no modules for a virtual environment. These
# are those of a public job script of 2025. The plugin is installed with EasyBuild-user; a plugin of
# your own is named by NCCL_NET_PLUGIN.
module load "LUMI/${FRONTIER_LLM_LUMI:-25.03}" partition/G "rocm/${FRONTIER_LLM_ROCM:-6.3.4}" \
  aws-ofi-rccl
eval "$given"

# NCCL_NET_GDR_LEVEL is not set: jobs on several nodes hang with PHB and SYS since ROCm 7, and are as
# fast without it (lumi-ai-factory/laifs-container-recipes#30, 2026-04; the AI guide removed it in its
# pull request 97, 2026-05).
# Nor are FI_CXI_RDZV_*: they belong to a protocol that needs --network=disable_rdzv_get (HPE), and
# LUMI's pages do not say whether the site allows it.

# Let a GCD write to another GCD without a copy through the host. RCCL warns that it may hang without
# it (HPE; ROCm/rccl#1026).
export HSA_FORCE_FINE_GRAIN_PCIE="${HSA_FORCE_FINE_GRAIN_PCIE:-1}"
# Put MIOpen's caches on the node, since it cannot lock files on Lustre (AI guide).
export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-/tmp/miopen-$USER}"
export MIOPEN_CUSTOM_CACHE_DIR="${MIOPEN_CUSTOM_CACHE_DIR:-/tmp/miopen-$USER}"

# The cores next to each GCD, without the first core of each group, which jobs cannot use. Local rank
# 0 has the cores 49 to 55 next to GCD 0, and so on (LUMI; the AI guide has the same masks).
masks=fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000
# shellcheck disable=SC2034 # train_job.sh uses them
rank_options=("--cpu-bind=mask_cpu:$masks")
# Show each rank the GCD that has its local number. --gpus-per-task would hide the GCDs from each
# other, so LUMI uses this instead (LUMI, select_gpu).
# shellcheck disable=SC2016,SC2034 # each rank expands the variable
rank_command=(bash -c 'ROCR_VISIBLE_DEVICES=$SLURM_LOCALID exec "$@"' select_gpu)
# shellcheck source=scripts/slingshot_env.sh
source "${BASH_SOURCE[0]%/*}/slingshot_env.sh"
# shellcheck source=scripts/common_env.sh
source "${BASH_SOURCE[0]%/*}/common_env.sh"
