"""The public names of frontier_llm/engine."""

from frontier_llm.engine import (
    AdamW,
    Checkpoints,
    Formats,
    Optimizer,
    ParameterGroup,
    Precision,
    Sharded,
    Watchdog,
    shard,
)

__all__ = [
    "AdamW", "Checkpoints", "Formats", "Optimizer", "ParameterGroup", "Precision", "Sharded",
    "Watchdog", "shard",
]  # fmt: skip
