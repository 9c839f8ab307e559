#!/usr/bin/env bash
# Train on your own text: examples/laptop_text/run.sh TEXT [key=value ...]
set -euo pipefail
text=$(realpath "$1")
shift
run=${RUN:-runs/laptop_text}
cd "$(dirname "$0")/../.."
frontier_llm() { "${PYTHON:-.venv/bin/python}" -m frontier_llm "$@"; }
# preprocess takes the settings of the data only; train takes all settings
data=(data=text data.path="$text")
for setting in "$@"; do
  [[ $setting == data.* ]] && data+=("$setting")
done

frontier_llm preprocess "${data[@]}"
frontier_llm train "${data[@]}" trainer.steps=300 run.dir="$run" "$@"
frontier_llm generate "$run" --tokens 60 "${PROMPT:-The }"
