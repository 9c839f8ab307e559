"""What a rank's process groups did last, as torch's flight recorder saw it.

torch keeps the last 2,000 collectives of a process in memory, megatron's among them; with gloo all
but those between two ranks. Nothing is counted here and no collective is slowed: the record is
read when a run stalls.
"""

import json
from dataclasses import dataclass
from typing import Any

_OVER = "completed"
"""NCCL's word; gloo, whose states stay at the first one, says `retired`."""


@dataclass(frozen=True)
class LastCollective:
    """The newest collective of a rank."""

    operation: str
    """`all_reduce` and the like."""
    group: str
    """torch's name of the group, with its ranks where it has them."""
    sequence: int
    """How many the group had begun by then."""
    is_waiting: bool
    """Whether it has not completed: this rank waits for others in it."""

    def __str__(self) -> str:
        state = "waiting in" if self.is_waiting else "done with"
        return f"{state} {self.operation} #{self.sequence} of group {self.group}"


def last_collective() -> LastCollective | None:
    """Return this process's newest collective; None if there was none, or torch cannot say."""
    try:
        from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # the stubs lack it
            _dump_fr_trace_json,
        )

        trace = json.loads(_dump_fr_trace_json(True, False))
    except (ImportError, RuntimeError, ValueError):  # a private function: it may go
        return None
    entries = trace.get("entries") or []
    return _read(entries[-1], trace) if entries else None


def _read(entry: dict[str, Any], trace: dict[str, Any]) -> LastCollective:
    name, description = (*entry.get("process_group", ("?", "")), "")[:2]
    ranks = trace.get("pg_config", {}).get(str(name), {}).get("ranks", "")
    operation = str(entry.get("profiling_name", "?")).partition(":")[2] or "?"
    return LastCollective(
        operation=operation,
        group=f"{description or name} {ranks}".strip(),
        sequence=int(entry.get("collective_seq_id", 0) or entry.get("p2p_seq_id", 0)),
        is_waiting=entry.get("state") != _OVER and not entry.get("retired", False),
    )
