"""How processes are started and find each other."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class LaunchConfig(Section):
    """Local processes, and what a job asks of Slurm (tools/launch.py).

    In a rank of srun or torchrun, `ranks`, `port` and `nodes` do not matter.
    """

    ranks: int = Field(ge=1)
    """Processes to start on this machine when neither srun nor torchrun did."""
    ranks_per_node: int | None = Field(ge=1)
    """Where a node ends; null = what the launcher of the job says (locally: one node). Smaller
    numbers let node borders be exercised on one machine."""
    nodes: int | None = Field(ge=1)
    """Nodes that tools/launch.py asks Slurm for, with cluster.ranks_per_node ranks on each; null =
    as many as launch.ranks fill."""
    port: int | None = Field(ge=1, le=65535)
    """TCP port of the rendezvous; null = a free one (under srun: derived from the job)."""
    timeout_seconds: float = Field(gt=0)
    """A collective that waits longer ends the run: with gloo, and where watchdog.enabled=false also
    with NCCL and RCCL, which else leave that to the watchdog's limits."""
    meeting_seconds: float = Field(gt=0)
    """How much later than rank 0 another rank may have loaded its libraries and reported."""
    preflight_seconds: float = Field(gt=0)
    """At start-up every process group is used once; a rank that does not come to it within this
    time is named, and the run ends."""
    stop_minutes: float = Field(ge=0)
    """How long before the end of a Slurm job the run saves and stops by itself; two steps are
    added. 0 = only on a signal or a STOP file."""
    point_minutes: float = Field(gt=0)
    """A point of a sweep (`train.py -m`) that takes longer is ended and counts as failed."""
    point_value: Literal["speed", "loss"]
    """What a sweep's search looks for: most tokens a second, or least validation loss."""
    elastic: bool
    """Whether a run may go on with another number of replicas: the micro-batch and numeric sharding
    factors are fitted to those that there are; the global batch stays."""
    threads: int | None = Field(ge=1)
    """CPU threads a rank; null = its share of the cores."""
