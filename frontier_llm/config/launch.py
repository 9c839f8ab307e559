"""How processes are started and find each other."""

from pydantic import Field

from frontier_llm.config.section import Section


class LaunchConfig(Section):
    """Local processes; under srun or torchrun only the time-out and the threads matter."""

    ranks: int = Field(ge=1)
    """Processes to start on this machine when neither srun nor torchrun did."""
    ranks_per_node: int | None = Field(ge=1)
    """Where a node ends; null = what the launcher of the job says (locally: one node). Smaller
    numbers let node borders be exercised on one machine."""
    port: int | None = Field(ge=1, le=65535)
    """TCP port of the rendezvous; null = a free one (under srun: derived from the job)."""
    timeout_seconds: float = Field(gt=0)
    """A collective that waits longer ends the run."""
    threads: int | None = Field(ge=1)
    """CPU threads a rank; null = its share of the cores."""
