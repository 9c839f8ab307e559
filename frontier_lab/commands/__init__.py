"""The commands of `frontier-llm` that no training run needs, one file per command.

Each has a function `main(arguments)` that returns the exit code. `plan_measured`,
`evaluate_text`, `state_statistics` and `export_weights` are parts of `plan`, `evaluate` and
`inspect_checkpoint`.
"""
