"""The command line: the program `frontier-llm`, one file per command. Only this package uses hydra.

- `main` finds a command and turns a user's mistake into a message and an exit code.
- `compose` makes a configuration from `conf/` and the overrides; `package_files` locates `conf/`.
- `experiments` reads the header of an experiment; `options`, `help` and `console` are shared.
- Every other file is one command with a function `main(arguments)` that returns the exit code, or
  a part of one command: `plan_tables` and `planned_experiment` of `plan`, `trial` of the sweeps.
"""
