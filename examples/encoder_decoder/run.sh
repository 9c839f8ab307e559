#!/usr/bin/env bash
# From a decoder to an encoder-decoder: examples/encoder_decoder/run.sh TEXT [key=value ...]
set -euo pipefail
text=$(realpath "$1")
shift
run=${RUN:-runs/encoder_decoder}
cd "$(dirname "$0")/../.."
frontier_llm() { "${PYTHON:-.venv/bin/python}" -m frontier_llm "$@"; }
both=(data.path="$text" data.sequence_length=128 trainer.steps=100 "$@")

frontier_llm train model=gemma2_tiny data=text "${both[@]}" run.dir="$run/decoder"
frontier_llm train model=t5gemma_tiny data=text_ul2 "${both[@]}" \
  run.init_from="$run/decoder" run.dir="$run/adapted"
frontier_llm evaluate "$run/adapted"
frontier_llm generate "$run/adapted" --tokens 40 "${PROMPT:-The }"
