"""Which process holds which rank of a job.

The coordinator (coordinator.py) publishes a roster for each generation (roster_store.py), and
chooses who takes the place of a dead process (successors.py). A process that holds ranks sees the
job through a `Membership` (member.py). Processes are forked on this machine (launcher.py), or by an
agent in each task of a Slurm job (agents.py).
"""
