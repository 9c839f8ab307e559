"""What a contender is to the worker that times it, and what all contenders have in common."""

from typing import Protocol

import torch

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
SEED = 1

MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, each [b, s] int64."""


class Peer(Protocol):
    """One rank of a contender."""

    parameters: int
    """Of the whole model."""

    def step(self, batches: list[MicroBatch]) -> float:
        """Make one step: forward and backward, clipping, AdamW; return a mean loss.

        Collective over all ranks.
        """

    def counted_bytes(self) -> float | None:
        """Return what it says a rank sent between nodes in the last step, if it does."""
