"""Launch, rendezvous and failure handling of the processes of a job.

- `world`: the rank, size and node of this process, read from the variables of srun or torchrun
  (`slurm` reads those of srun); `cores` sets the number of CPU threads per rank.
- `rendezvous`: the key-value store that all ranks share, and torch's process group.
- `coordination`: broadcast from rank 0 through the store, and a common exit.
- `launcher`: starts the ranks of one machine (`forked_ranks`), names the cause if one fails, and
  starts all again if wanted.
- `replacement`: the same, but ranks that die are replaced while the others keep what they have;
  `agents` does so for the tasks of a Slurm job. Both poll a `coordinator`, which says who holds
  which rank (`roster_store`). `membership` is the other side, in the process of a rank; it ends
  collectives that wait for a dead rank (`connections`).
- `rank`: runs the work of one rank and reports its failure.
- `failure`: describes an exception by a file, a message and an exit code; finds the failure that
  caused the others.
- `stop`: requests to stop, by a signal, by a file, or by the time limit of the job.
"""
