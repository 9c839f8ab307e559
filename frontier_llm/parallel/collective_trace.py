"""What a rank's process groups did last, as torch's flight recorder saw it.

torch keeps the last 2,000 collectives of a process in memory, megatron's among them; with gloo all
but those between two ranks. Nothing is counted here and no collective is slowed: the record is
read when a run stalls.
"""

import json
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""NCCL's recorder is its own; the other has gloo's."""
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
    newest: list[tuple[int, LastCollective]] = []
    for dump in _DUMPS:
        try:
            trace = json.loads(getattr(_distributed_c10d, dump)(True, False))
        except (AttributeError, RuntimeError, ValueError):  # private functions: they may go
            continue
        for entry in (trace.get("entries") or [])[-1:]:
            newest.append((int(entry.get("time_created_ns", 0)), _read(entry, trace)))
    return max(newest, key=lambda one: one[0])[1] if newest else None


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
