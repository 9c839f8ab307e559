"""Ranks: how they are started, find each other, are grouped, stopped and mourned.

- `world`: which rank this process is, and the store and process group it shares; `slurm` reads
  what srun says.
- `groups`: the process groups of a rank; `megatron_cpu` lets megatron-core run without a device.
- `rank_report`, `findings`, `preflight`: what ranks say of themselves at start-up, what is wrong
  with it, and every group used once.
- `watchdog`, `stall`, `collective_trace`: the end of a run that stands still, and who is late;
  `stragglers`: who is slow.
- `launcher`: the parent of local ranks; `children` are its processes, `cores` their threads.
- `rank`: what surrounds the work of one rank; `agreement`: what rank 0 does once for all.
- `failure`: what a rank leaves behind when it fails, and which failure was the cause.
- `stop`: requests to stop, by a signal, a file, or the clock of the job.
"""
