"""The training loop: its length, its evaluations, and when it stops."""

from pydantic import Field

from frontier_llm.config.section import Section


class TrainerConfig(Section):
    """The training loop."""

    steps: int = Field(ge=1)
    """Optimizer steps of the run."""
    seed: int = Field(ge=0)
    """Seed of the initial weights, of dropout and of the order of samples."""
    evaluate_every_steps: int | None = Field(ge=1)
    """Steps between two evaluations on validation data; null = only at the end."""
    evaluate_batches: int = Field(ge=1)
    """Global batches of validation data per evaluation."""
    bad_steps_allowed: int = Field(ge=0)
    """Number of consecutive steps that may be skipped because the loss or the gradient is not
    finite; one more stops the run. Overflows in fp16 count only at the minimum loss scale."""
    spike_factor: float | None = Field(gt=1)
    """A loss above this multiple of the median of the last `spike_window` steps rewinds the run: it
    reloads the checkpoint before and skips the samples that it has read since. null = never."""
    spike_window: int = Field(ge=1)
    """Number of last steps that a loss is compared with; earlier in a run no loss is a spike."""
    rewinds_allowed: int = Field(ge=0)
    """Number of rewinds in one run; the next spike ends it."""
    sample_tokens: int = Field(ge=0)
    """Tokens of text that the model generates at the end of a run; 0 = none."""
    sample_prompts: tuple[str, ...] = Field(strict=False)
    """Beginnings of the generated texts."""
