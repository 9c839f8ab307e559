"""The command line: the program `frontier-llm`, one file per command.

This package and the sweeps of frontier_lab import hydra, which composes configuration files.

- `main` finds a command and turns a user's mistake into a message and an exit code.
- `compose` makes a configuration from `conf/` and from overrides, the arguments `key=value`.
- `package_files` locates `conf/`, `group_files` reads one file, `experiments` its header.
- `options`, `help` and `console` are shared by commands.
- Every other file is a part of the command `train`, or shared by commands. frontier_lab has the
  commands that no training run needs, among them `launch`, which submits jobs.
"""
