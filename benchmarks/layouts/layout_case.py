"""Define the layouts of planner_layouts.py and the model that all of them train."""

from collections.abc import Sequence
from dataclasses import dataclass

from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode

RANKS = 2
"""Number of ranks of every layout, one per CPU core."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "replicated": ("sharding=replicated",),
    "zero1": ("sharding=zero1",),
    "zero2": ("sharding=zero2",),
    "zero3": ("sharding=zero3",),
    "zero3, quantised": ("sharding=zero3", "collectives=zeropp"),
    "zero1, bf16": ("sharding=zero1", "precision=bf16"),
    "zero2, recomputed": ("sharding=zero2", "recompute=full", "data.micro_batch=2"),
    "tensor": ("parallel.tensor=2",),
    "tensor, sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "1f1b": ("parallel.pipeline=2", "parallel.schedule=1f1b"),
    "interleaved": ("parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"),
    "zb_v, bf16": (
        "parallel.pipeline=2",
        "parallel.chunks=2",
        "parallel.schedule=zb_v",
        "precision=bf16",
    ),
}
"""Overrides of each layout, by its name."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the GPT that every layout trains, and samples per step."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    """Samples per step over all ranks."""

    def config(self, layout: str, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the configuration of a layout.

        Args:
            layout: name of the layout.
            overrides: further overrides, such as the cluster.
        """
        values = compose(
            [
                "model=gpt_tiny",
                "model.tied=false",
                f"model.layers={self.layers}",
                f"model.hidden={self.hidden}",
                f"model.heads={self.heads}",
                f"model.vocabulary={self.vocabulary}",
                f"data.vocabulary={self.vocabulary}",
                f"data.sequence_length={self.sequence}",
                "data.micro_batch=1",
                f"data.global_batch={self.batch}",
                "parallel.pipeline=1",
                "parallel.waiting_weights=0",
                "precision=fp32",
                "recompute=none",
                "checkpoint=off",
                *LAYOUTS[layout],
                *overrides,
            ]
        )
        config: RunConfig = decode(values)
        return config
