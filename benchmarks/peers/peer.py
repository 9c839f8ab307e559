"""The interface that every contender of bench_sharding.py implements, and its constants."""

from typing import Protocol

import torch

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
SEED = 1

MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of a micro-batch, each [samples, sequence] int64."""


class Peer(Protocol):
    """The interface of one rank of a contender."""

    parameters: int
    """Number of parameters of the complete model."""

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step (forward, backward, clipping, AdamW) and return the mean loss.

        Collective over all ranks.
        """

    def counted_bytes(self) -> float | None:
        """Return the bytes sent between nodes in the last step; None if they are not counted."""
