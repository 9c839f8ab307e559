"""How processes are started and connect to each other."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class LaunchConfig(Section):
    """Local processes, and the resources of a Slurm job (frontier-llm launch).

    `ranks`, `port` and `nodes` have no effect in processes that srun or torchrun started.
    """

    ranks: int = Field(ge=1)
    """Processes to start on this machine, if neither srun nor torchrun starts them."""
    ranks_per_node: int | None = Field(ge=1)
    """Ranks that count as one node; null = the launcher's number (on one machine: all ranks).
    A smaller number simulates several nodes on one machine."""
    nodes: int | None = Field(ge=1)
    """Nodes that frontier-llm launch requests from Slurm, with cluster.ranks_per_node ranks each;
    null = as many as launch.ranks fill."""
    port: int | None = Field(ge=1, le=65535)
    """TCP port of the rendezvous; null = a free port (under srun: derived from the job id)."""
    timeout_seconds: float = Field(gt=0)
    """A collective that takes longer ends the run. This holds for gloo; for NCCL and RCCL only with
    watchdog.enabled=false, since otherwise the limits of the watchdog apply."""
    meeting_seconds: float = Field(gt=0)
    """How much later than rank 0 another rank may finish loading its libraries and connect."""
    preflight_seconds: float = Field(gt=0)
    """Limit of the preflight check, which runs one collective in every process group at start-up.
    Ranks that do not take part in time are named, and the run ends."""
    stop_minutes: float = Field(ge=0)
    """Time before the end of a Slurm job at which the run saves a checkpoint and stops; the time of
    two steps is added. 0 = the run stops only on a signal or a STOP file."""
    trial_minutes: float = Field(gt=0)
    """Time limit of a sweep's trial (`train.py -m`); a trial that takes longer counts as failed."""
    trial_value: Literal["speed", "loss"]
    """Goal of a sweep's search: `speed`, most tokens per second, or `loss`, least validation
    loss."""
    elastic: bool
    """Whether a run may resume with another number of replicas: data.micro_batch and numeric
    sharding factors are then fitted to that number, and the global batch stays the same."""
    threads: int | None = Field(ge=1)
    """CPU threads per rank; null = OMP_NUM_THREADS, or an equal share of the cores if unset."""
