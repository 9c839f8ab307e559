"""The counters of a run, which a checkpoint stores in addition to the model states."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Counters with the same values on every rank. The next step is `step + 1`."""

    step: int = 0
    """Number of steps that have ended, including steps whose update was skipped."""
    next_sample: int = 0
    """Number of the first sample of the next step. It is larger than `samples` after a rewind (a
    return to an earlier checkpoint), because a rewind leaves samples out."""
    samples: int = 0
    """Number of samples with which the model has been trained."""
    tokens: int = 0
    """Number of tokens that the model has read in these samples, in encoder and decoder."""
    updates: int = 0
    """Number of steps whose update was not skipped. Adam's bias correction depends on it."""
    bad_steps: int = 0
    """Number of steps in a row, up to the last step, whose loss or gradient was not finite."""
    rewinds: int = 0
    """Number of rewinds after spikes of the loss."""
    recent_losses: Sequence[float] = ()
    """With `trainer.spike_factor`: losses of the last steps, at most `trainer.spike_window`."""

    def advance(self, samples: int, tokens_per_sample: int, *, skipped: bool) -> None:
        """Count a step.

        Args:
            samples: number of samples that the step has processed.
            tokens_per_sample: tokens of a sample, in encoder and decoder.
            skipped: whether the update of the step was skipped.
        """
        self.step += 1
        self.next_sample += samples
        self.samples += samples
        self.tokens += samples * tokens_per_sample
        self.updates += not skipped

    def to_meta(self) -> dict[str, Any]:
        """Return the counters as plain JSON for a checkpoint."""
        return asdict(self)

    def load_meta(self, meta: dict[str, Any], tokens_per_sample: int = 0) -> None:
        """Set the counters to those of a checkpoint.

        Args:
            meta: the counters. Older checkpoints lack the recent losses and the tokens.
            tokens_per_sample: of the run that saved it; from it the tokens of an older checkpoint
                are computed.
        """
        for field in fields(self):
            setattr(self, field.name, meta.get(field.name, field.default))
        if "tokens" not in meta:
            self.tokens = self.samples * tokens_per_sample
