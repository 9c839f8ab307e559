"""One micro-batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Token ids of some samples.

    Attributes:
        tokens: [b, s] int64, what the model reads.
        labels: [b, s] int64, what it should say: the tokens one place on.
        positions: [b, s] int64, 0..s-1.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.positions.to(device))
