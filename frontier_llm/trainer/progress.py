"""How far a run has come: all that goes on from a checkpoint besides the model states."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters that every rank keeps alike. The next step is `step + 1`."""

    step: int = 0
    """Steps done, skipped ones too."""
    next_sample: int = 0
    """The first sample of the next step. Not always `samples`: a rewind leaves some out."""
    samples: int = 0
    """Samples that the model has learned from."""
    updates: int = 0
    """Steps that were not skipped: what the optimizer's bias correction counts."""
    bad_steps: int = 0
    """Steps in a row, up to the last one, that were not finite."""
    rewinds: int = 0
    """How often a spike of the loss has sent the run back."""

    def advance(self, samples: int, *, skipped: bool) -> None:
        """Count a step."""
        self.step += 1
        self.next_sample += samples
        self.samples += samples
        self.updates += not skipped

    def to_meta(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: plain JSON."""
        return asdict(self)

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Go on from where a checkpoint was made."""
        for name in asdict(self):
            setattr(self, name, meta[name])
