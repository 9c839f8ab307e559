"""A real Slurm cluster on one machine, into which benchmarks/faults/reliability.py injects faults.

Each node of the cluster is a network namespace.

- `nodes`: namespaces joined by a bridge, with links that can be cut.
- `cluster`: the daemons munged, slurmctld and one slurmd per node.
- `jobs`: submission of the scripts of this repository, and the state and output of jobs.
- `fault_cases`: the faults, and the text with which the output of a job must name each cause.
- `starts`: the time of a start-up, and its store operations for thousands of ranks.
"""
