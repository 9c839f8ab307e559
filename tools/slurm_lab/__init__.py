"""A real Slurm on one machine, its nodes network namespaces, for proofs of what happens to jobs.

- `nodes`: namespaces on a bridge, with links that can be cut.
- `cluster`: munged, slurmctld and a slurmd for each node.
- `jobs`: jobs of this repository's own scripts, and what became of them.
- `faults`: what is done to a job, and what was seen.
"""
