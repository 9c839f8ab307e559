"""The loop: how long, how often, and when to give up."""

from pydantic import Field

from frontier_llm.config.section import Section


class TrainerConfig(Section):
    """Length and rhythm of a run."""

    steps: int = Field(ge=1)
    """Updates to make."""
    seed: int = Field(ge=0)
    """Decides initial weights, dropout and the order of samples."""
    evaluate_every_steps: int | None = Field(ge=1)
    """Steps between two validations; null = only at the end."""
    evaluate_batches: int = Field(ge=1)
    """Global batches of validation data in one validation."""
    bad_steps_allowed: int = Field(ge=0)
    """Steps in a row whose loss or gradient is not finite, and which are skipped, before the run
    stops. (fp16's overflows count only once the loss scale is at its minimum.)"""
    spike_factor: float | None = Field(gt=1)
    """A loss above this many times the median of the last `spike_window` steps sends the run back
    to the checkpoint before, and on behind the samples that it had read since; null = never."""
    spike_window: int = Field(ge=1)
    """Steps whose losses a spike is compared with; before there are as many, none is a spike."""
    rewinds_allowed: int = Field(ge=0)
    """Rewinds of one run before the next spike ends it."""
    sample_tokens: int = Field(ge=0)
    """Tokens of text sampled from the model at the end; 0 = none."""
    sample_prompts: tuple[str, ...] = Field(strict=False)
    """What the samples begin with."""
