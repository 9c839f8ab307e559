"""Checks before a run, and diagnosis of a run that hangs or has lost a rank.

- `preflight`: before the model is built, all ranks report to rank 0, which checks the reports
  (`rank_checks`). Then every process group is tested with one collective.
- `watchdog`: ends a run that hangs or has lost a rank. `diagnosis` names the ranks at fault, from
  the states of all ranks. The ranks exchange them in the store (`alarm`).

Slow ranks are found elsewhere: trainer/callbacks/run_checks.py.
"""
