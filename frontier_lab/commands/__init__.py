"""The commands of `frontier-llm` that study, one file per command.

Each has a function `main(arguments)` that returns the exit code. `plan_measured` and
`evaluate_text` are parts of `plan` and `evaluate`.
"""
