# shellcheck shell=bash
# What a Slurm job script does after it has sourced the *_env.sh of its site. Its arguments are those
# of frontier-llm train. A site may set these arrays:
#   rank_options   options of srun for the ranks
#   rank_command   a command that starts each rank
# shellcheck source=scripts/restarts.sh
source "${BASH_SOURCE[0]%/*}/restarts.sh"

# Starting Python reads some ten thousand small files. If hundreds of ranks did so at once, the
# shared file system would be slow for minutes. Instead Slurm broadcasts one archive to every node.
each_node=(srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1)
"${each_node[@]}" mkdir --parents "$FRONTIER_LLM_NODE_LOCAL" "${MIOPEN_USER_DB_PATH:-/tmp}" \
  "${MIOPEN_CUSTOM_CACHE_DIR:-/tmp}"
sbcast --force "$FRONTIER_LLM_ARCHIVE" "$FRONTIER_LLM_NODE_LOCAL/venv.tar"
"${each_node[@]}" \
  tar --extract --file="$FRONTIER_LLM_NODE_LOCAL/venv.tar" --directory="$FRONTIER_LLM_NODE_LOCAL"
# The folder may be in the memory of the node, so the archive does not stay beside its content.
"${each_node[@]}" rm --force "$FRONTIER_LLM_NODE_LOCAL/venv.tar"

# Ranks that are started again, a requeued job and the next job of an array have the same run.dir,
# and resume its run.
# shellcheck disable=SC2154 # restarts.sh and the site's file set the arrays
train_with_restarts srun "${srun_options[@]}" --distribution=block \
  --cpus-per-task="$SLURM_CPUS_PER_TASK" ${rank_options[@]+"${rank_options[@]}"} \
  ${rank_command[@]+"${rank_command[@]}"} \
  "$FRONTIER_LLM_NODE_LOCAL/.venv/bin/python" -m frontier_llm train \
  run.dir="runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" run.resume=auto \
  "${replacing[@]}" "$@"
