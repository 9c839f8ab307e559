#!/usr/bin/env bash
# Train in a Slurm job, or on this machine if it has no Slurm. Then convert the weights to the format
# of Hugging Face, and load them with transformers.
#   SBATCH_OPTIONS="-A PROJECT" examples/slurm_to_hugging_face/run.sh OUT [key=value ...]
set -euo pipefail
out=$(realpath --canonicalize-missing "$1")
shift
run=$(realpath --canonicalize-missing "${RUN:-runs/slurm_to_hugging_face}")
example=$(realpath "$(dirname "$0")")
cd "$example/../.."
python=${PYTHON:-.venv/bin/python}

if command -v sbatch >/dev/null; then
  read -ra sbatch_options <<<"${SBATCH_OPTIONS:-}"
  "$python" -m frontier_llm launch --submit --wait "${sbatch_options[@]}" "$@" run.dir="$run"
else
  "$python" -m frontier_llm train "$@" run.dir="$run"
fi
"$python" -m frontier_llm convert --to hf "$run" "$out"
"$python" "$example/load_model.py" "$out" "${PROMPT:-import }"
