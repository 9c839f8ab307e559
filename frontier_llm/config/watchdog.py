"""How long each phase of a run may take before it counts as a stall."""

from pydantic import Field

from frontier_llm.config.section import Section


class WatchdogConfig(Section):
    """Limits; a rank that exceeds one makes every rank say where it is, and ends the run.

    With gloo one that is longer than launch.timeout_seconds is not reached where a collective
    hangs: it gives up first, and names the ranks that did not come.
    """

    enabled: bool
    """Whether ranks are watched."""
    startup_seconds: float = Field(gt=0)
    """From the start of a rank to its first step: groups, corpus, model, checkpoint."""
    first_step_seconds: float = Field(gt=0)
    """Each of the first three steps, in which connections are made and kernels are chosen."""
    step_seconds: float = Field(gt=0)
    """A step; or `step_factor` times the median of the last 20 steps, if that is longer."""
    step_factor: float = Field(gt=1)
    """How many times longer than usual a step may take."""
    checkpoint_seconds: float = Field(gt=0)
    """What the training waits for a checkpoint."""
    evaluation_seconds: float = Field(gt=0)
    """An evaluation."""
    stragglers_every_steps: int | None = Field(ge=1)
    """Steps between two comparisons of the ranks' speeds; null = never. One takes about 0.1 s."""
    straggler_ratio: float = Field(gt=1)
    """A rank that takes this many times the median of its stage is named as slow."""
