"""Parts of kill_loop.py: runs that are killed at random moments and resumed.

- `forked_run`: one start of a run, in forked processes that can be killed.
- `restarted_run`: a run that is started again and again; a reference run that is not killed.
- `run_snapshot`: the content of a run directory at one moment.
- `kill_runs`: the loop that starts, kills and compares runs; `kill_summary`: its result.
"""
