"""A real Slurm on one machine for fault injection; its nodes are network namespaces.

- `nodes`: namespaces joined by a bridge, with links that can be cut.
- `cluster`: the daemons munged, slurmctld and one slurmd per node.
- `jobs`: submission of the scripts of this repository, and the state and output of jobs.
- `fault_cases`: the faults, and the text in which a job must name each cause.
- `starts`: start-up time, and store operations for thousands of ranks.
"""
