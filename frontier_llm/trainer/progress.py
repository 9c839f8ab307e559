"""The counters of a run, which a checkpoint keeps in addition to the model states."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters with the same values on every rank. The next step is `step + 1`."""

    step: int = 0
    """Steps done, including skipped ones."""
    next_sample: int = 0
    """First sample of the next step. After a rewind it is larger than `samples`."""
    samples: int = 0
    """Samples that the model has been trained on."""
    updates: int = 0
    """Steps that were not skipped, as the optimizer's bias correction counts them."""
    bad_steps: int = 0
    """Steps in a row, up to the last one, that were not finite."""
    rewinds: int = 0
    """Number of rewinds after spikes of the loss."""

    def advance(self, samples: int, *, skipped: bool) -> None:
        """Count a step."""
        self.step += 1
        self.next_sample += samples
        self.samples += samples
        self.updates += not skipped

    def to_meta(self) -> dict[str, Any]:
        """Return the counters as plain JSON for a checkpoint."""
        return asdict(self)

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Take over the counters of a checkpoint."""
        for name in asdict(self):
            setattr(self, name, meta[name])
