"""Dimensions of a GPT that benchmarks train. Imports nothing that only frontier_llm needs."""

from argparse import Namespace
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shape:
    """Dimensions of the GPT that all contenders train."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    """Tokens per sample."""

    @classmethod
    def of(cls, options: Namespace) -> "Shape":
        """Return the shape of a command line, whose options have the names of the fields."""
        return cls(*(getattr(options, field.name) for field in fields(cls)))

    def overrides(self) -> list[str]:
        """Return the overrides of train.py for this model."""
        return [
            "model=gpt_tiny",
            f"model.layers={self.layers}",
            f"model.hidden={self.hidden}",
            f"model.heads={self.heads}",
            f"model.vocabulary={self.vocabulary}",
            f"data.vocabulary={self.vocabulary}",
            f"data.sequence_length={self.sequence}",
        ]
