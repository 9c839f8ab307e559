"""The section `trainer`: length of the training loop, evaluations, and reasons to stop."""

from pydantic import Field

from frontier_llm.config.section import Section


class TrainerConfig(Section):
    """The training loop."""

    steps: int = Field(ge=1)
    """Optimizer steps of the run."""
    seed: int = Field(ge=0, lt=2**62)
    """Seed of the initial weights, of dropout and of the order of samples."""
    deterministic: bool = False
    """Whether a run on a GPU uses only operations that add numbers in a fixed order, so that it can
    be repeated on the same machine. These operations are slower. On a CPU the losses are the same
    with and without."""
    evaluate_every_steps: int | None = Field(ge=1)
    """Steps between two evaluations on validation data; null = only at the end."""
    evaluate_batches: int = Field(ge=1)
    """Global batches of validation data per evaluation. If there are fewer samples, an evaluation
    reads each of them once."""
    bad_steps_allowed: int = Field(ge=0)
    """Number of consecutive steps that may be skipped because the loss or the gradient is not
    finite. If one more step fails, the run stops. Overflows in fp16 count only at the minimum loss
    scale."""
    spike_factor: float | None = Field(gt=1)
    """A loss is a spike if it exceeds this multiple of the median of the last `spike_window` steps.
    After a spike the run rewinds: it reloads the previous checkpoint and skips the samples that it
    has read since then. null = never."""
    spike_window: int = Field(ge=1)
    """Number of previous steps with which a loss is compared. Until a run has done this many steps,
    no loss is a spike."""
    rewinds_allowed: int = Field(ge=0)
    """Number of rewinds that a run may do. The next spike ends the run."""
    sample_tokens: int = Field(ge=0)
    """Tokens of text that the model generates at the end of a run; 0 = none."""
    sample_prompts: tuple[str, ...] | None = Field(strict=False)
    """Texts that the model continues at the end of a run. null = the first words of validation
    documents."""
