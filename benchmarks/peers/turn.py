"""What bench_sharding.py asks a worker for, what each rank answers, and what a contender offers.

Turns and answers are sent as JSON.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch

from benchmarks.testbed.shape import Shape

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
SEED = 1
MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of a micro-batch, each [samples, sequence] int64."""
Precision = Literal["fp32", "bf16"]


class Peer(Protocol):
    """One rank of a contender."""

    parameters: int
    """Number of parameters of the complete model."""

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step (forward, backward, clipping, AdamW) and return the mean loss.

        Collective over all ranks.
        """

    def counted_bytes(self) -> float | None:
        """Return the bytes sent between nodes in the last step; None if they are not counted."""


@dataclass(frozen=True)
class Turn:
    """One turn of a contender: its ranks from their fork to their end."""

    contender: str
    ranks: int
    precision: Precision
    shape: Shape
    samples: int
    """Samples per micro-batch."""
    micro_batches: int
    """Micro-batches per rank and step."""
    warmup: int
    """Steps before the timed ones."""
    steps: int
    """Timed steps."""
    threads: int
    """CPU threads per rank."""
    ranks_per_node: int
    """Consecutive ranks that share a node."""
    ranks_per_package: int
    """Consecutive ranks that share a package; 1 = there are no packages."""
    namespaces: tuple[str, ...]
    """Network namespace of each rank; empty = loopback."""
    limit_seconds: float
    """Time limit after which the ranks are killed."""

    @property
    def ranks_per_interface(self) -> int:
        """Ranks that share a network interface: those of a package, or of a node."""
        return self.ranks_per_package if self.ranks_per_package > 1 else self.ranks_per_node

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.ranks * self.micro_batches * self.samples * self.shape.sequence

    def to_json(self) -> str:
        """Return the turn as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Turn":
        """Read the output of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        shape, namespaces = Shape(**values.pop("shape")), tuple(values.pop("namespaces"))
        return cls(shape=shape, namespaces=namespaces, **values)


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank in a turn."""

    step_seconds: list[float]
    """Times of the timed steps."""
    losses: list[float]
    """Losses of all steps, warm-up first."""
    parameters: int
    start_bytes: int
    """Peak resident memory before the model was built, which libraries use."""
    peak_bytes: int
    """Peak resident memory of the turn (ru_maxrss): libraries, model, states and activations."""
    sent_bytes: float | None
    """Bytes per step that the counter of the network interface shows, without those sent again;
    None on loopback. With packages, an interface is that of a package."""
    counted_bytes: float | None
    """Bytes per step that pass such an interface as counted by frontier_llm; None for other
    libraries."""
    idle_share: float | None
    """Idle share of all cores' time during the timed steps; None if unknown."""
