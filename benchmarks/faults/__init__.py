"""Runs under faults: killed processes, lost nodes, full disks, on this machine and under Slurm."""
