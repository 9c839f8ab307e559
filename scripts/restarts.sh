# shellcheck shell=bash
# Sourced by the job scripts. Runs a training command again, in the same job, if it fails for a
# reason that may have passed: a rank died, hung or lost contact. The nodes are still there, so this
# costs the start-up but no time in the queue. After FRONTIER_LLM_RESTARTS (default 3) tries without
# a new step, the job ends with the exit code of the command.
#   train_with_restarts COMMAND... run.dir=DIR ...
#
# With FRONTIER_LLM_SPARE_NODES=N and `sbatch --no-kill`, dead ranks are replaced while the others
# keep their states. The last N nodes of the job wait, and take the place of nodes that are lost.

# kill-on-bad-exit: if one rank fails, Slurm ends all ranks. Otherwise they would wait and keep the
# nodes. Ranks that can be replaced outlive each other, and end by themselves.
# shellcheck disable=SC2034 # the job scripts use both
srun_options=(--kill-on-bad-exit=1)
# shellcheck disable=SC2034
replacing=()
if [ -n "${FRONTIER_LLM_SPARE_NODES:-}" ]; then
  # shellcheck disable=SC2034
  srun_options=(--kill-on-bad-exit=0 --no-kill)
  # shellcheck disable=SC2034
  replacing=(recovery.enabled=true
    "recovery.spares=$((FRONTIER_LLM_SPARE_NODES * ${SLURM_NTASKS_PER_NODE:-1}))")
fi

# FRONTIER_LLM_REQUEUES=N: a job that ends like this is put into the queue again, up to N times in
# all. If this script is lost with its node, launch/requeue.py does the same.
requeue_job() {
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "${FRONTIER_LLM_REQUEUES:-0}" ]; then
    echo "the job is put into the queue again ($((${SLURM_RESTART_COUNT:-0} + 1)) of" \
      "$FRONTIER_LLM_REQUEUES times, FRONTIER_LLM_REQUEUES)" >&2
    scontrol requeue "$SLURM_JOB_ID" || return 0
    sleep 600 # Slurm ends this job
  elif [ "${FRONTIER_LLM_REQUEUES:-0}" -gt 0 ]; then
    echo "the job was put into the queue again ${SLURM_RESTART_COUNT:-0} time(s), and ends now" \
      "(FRONTIER_LLM_REQUEUES=$FRONTIER_LLM_REQUEUES)" >&2
  fi
}

train_with_restarts() {
  local run="" argument code steps most=0 tries=0 limit=${FRONTIER_LLM_RESTARTS:-3}
  for argument in "$@"; do # the last value counts
    case $argument in
      run.dir=*) run=${argument#run.dir=} ;;
    esac
  done
  while true; do
    code=0
    "$@" || code=$?
    case $code in
      0 | 2 | 3) return "$code" ;; # done, wrong configuration, stopped on request
    esac
    # an error whose message says what to do, such as divergence or a full disk
    if grep --quiet --no-messages '"kind": "user"' "$run/failures/cause.json"; then
      return "$code"
    fi
    steps=$(tail --lines=1 "$run/metrics.jsonl" 2> /dev/null |
      sed --quiet 's/^{"step": \([0-9]*\),.*/\1/p') || true
    if [ "${steps:-0}" -gt "$most" ]; then
      most=$steps
      tries=0
    fi
    if [ "$tries" -ge "$limit" ]; then
      echo "the run failed $((tries + 1)) time(s) without a new step: it is not started again" >&2
      requeue_job
      return "$code"
    fi
    tries=$((tries + 1))
    export FRONTIER_LLM_STARTED_AGAIN=1
    echo "exit code $code: the run is started again (try $tries of $limit without a new step)" >&2
  done
}
