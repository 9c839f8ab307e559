"""The section `watchdog`: time limits of the phases of a run."""

from pydantic import Field

from frontier_llm.config.section import Section


class WatchdogConfig(Section):
    """Time limits of the phases of a run. A rank that exceeds a limit has stalled.

    After a stall every rank reports where it is, and the run ends. With gloo,
    launch.timeout_seconds also limits each collective. A collective that exceeds it fails and names
    the ranks that did not take part.
    """

    enabled: bool
    """Whether the limits are enforced."""
    startup_seconds: float = Field(gt=0)
    """Limit from the start of a rank to its first step: process groups, corpus, model,
    checkpoint."""
    first_step_seconds: float = Field(gt=0)
    """Limit of each of the first three steps, in which connections are opened and kernels
    selected."""
    step_seconds: float = Field(gt=0)
    """Limit of a later step. If it is longer, the limit is `step_factor` times the median of the
    last 20 steps."""
    step_factor: float = Field(gt=1)
    """Multiple of the median step time that a step may take."""
    checkpoint_seconds: float = Field(gt=0)
    """Limit of the time during which training waits for a checkpoint."""
    evaluation_seconds: float = Field(gt=0)
    """Limit of an evaluation."""
    stragglers_every_steps: int | None = Field(ge=1)
    """Steps between two comparisons of the ranks' speeds; null = never. A comparison takes about
    0.1 s."""
    straggler_ratio: float = Field(gt=1)
    """A rank whose time exceeds this multiple of the median of all ranks is reported as slow."""
    replace_stragglers: bool = False
    """Whether a process that waits takes the place of a slow rank (recovery.enabled,
    recovery.spares)."""
