"""Launch, rendezvous and failure handling of the processes of a job.

- `world`: the rank, size and node of this process, read from the variables of srun or torchrun
  (`slurm` reads those of srun); `cores` sets the number of CPU threads per rank.
- `rendezvous`: the key-value store that all ranks share, and torch's process group.
- `coordination`: broadcast from rank 0 through the store, and a common exit.
- `forked_ranks`: forks the ranks of one machine, and notices when they end.
- `failure`: runs the work of one rank, describes its failure by a file, a message and an exit code,
  and finds the failure that caused the others.
- `stop`: requests to stop, by a signal, by a file, or by the time limit of the job.
"""
