"""Checks before a run, and diagnosis of a run that hangs, fails or slows down.

- `preflight`: before the model is built, all ranks report to rank 0 (`rank_report`), which checks
  the reports (`rank_checks`); then every process group runs one collective.
- `watchdog`: ends a run that hangs or has lost a rank; `diagnosis` names the ranks at fault, from
  the state of every rank, which includes its last collective (`collective_trace`).
- `stragglers`: names the ranks that compute more slowly than the others.
"""
