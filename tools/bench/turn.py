"""What a worker is asked to do, and what each rank answers. Plain data that travels as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Shape:
    """Dimensions of the GPT that every contender trains."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int


@dataclass(frozen=True)
class Turn:
    """One contender's ranks, from their fork to their end."""

    contender: str
    ranks: int
    precision: Precision
    shape: Shape
    samples: int
    """Of a micro-batch."""
    micro_batches: int
    """Of a rank and step."""
    warmup: int
    """Steps that are not timed."""
    steps: int
    """Steps that are timed."""
    threads: int
    """CPU threads a rank."""
    ranks_per_node: int
    """Where nodes end."""
    namespaces: tuple[str, ...]
    """Network namespace of each rank; empty = loopback."""
    limit_seconds: float
    """The ranks are killed then."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.ranks * self.micro_batches * self.samples * self.shape.sequence

    def to_json(self) -> str:
        """Write it on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Turn":
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        shape, namespaces = Shape(**values.pop("shape")), tuple(values.pop("namespaces"))
        return cls(shape=shape, namespaces=namespaces, **values)


@dataclass(frozen=True)
class RankFigures:
    """What one rank saw in a turn."""

    step_seconds: tuple[float, ...]
    """Of the timed steps."""
    losses: tuple[float, ...]
    """Of all steps, warm-up first."""
    parameters: int
    """Of the whole model."""
    start_bytes: int
    """Resident memory at its peak before the model was built: the libraries."""
    peak_bytes: int
    """Resident memory at its peak (ru_maxrss): libraries, model, states, buffers, activations."""
    sent_bytes: float | None
    """A step, by the counter of this rank's network interface; None on loopback."""
    counted_bytes: float | None
    """A step, between nodes, as frontier_llm counts; None for other libraries."""
    idle_share: float | None
    """Of all cores' time in the timed steps; None where the kernel does not tell."""


def figures_from(values: dict[str, Any]) -> RankFigures:
    """Read a rank's figures back from JSON."""
    step_seconds, losses = tuple(values.pop("step_seconds")), tuple(values.pop("losses"))
    return RankFigures(step_seconds=step_seconds, losses=losses, **values)
