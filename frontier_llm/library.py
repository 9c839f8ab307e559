"""The public names of frontier_llm/engine."""

from frontier_llm.engine import (
    AdamW, Checkpoints, Formats, Group, Precision, Sharded, Watchdog, shard,
)  # fmt: skip

__all__ = [
    "AdamW", "Checkpoints", "Formats", "Group", "Precision", "Sharded", "Watchdog", "shard",
]  # fmt: skip
