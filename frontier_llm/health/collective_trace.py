"""Reads the last collective of this process from torch's flight recorder, after a run hangs.

The flight recorder keeps the last 2,000 collectives of a process in memory, including those that
megatron starts. With gloo, it does not record messages between two ranks. With NCCL, it records a
collective when its kernel has been started. The first collective of a group is not recorded while
it creates the communicator, which needs all ranks of the group: it is found in the stacks.
"""

import json
import linecache
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

_DUMP_FUNCTIONS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch's functions that return the record of NCCL's and of gloo's collectives."""
_COMPLETED = "completed"
"""Value of `state` in a completed collective of NCCL. For gloo, `retired` is true instead."""


@dataclass(frozen=True)
class LastCollective:
    """The newest collective of a rank."""

    operation: str
    """Name of the operation: `all_reduce`, for example."""
    group: str
    """torch's name of the process group, followed by its ranks if torch has recorded them."""
    sequence: int
    is_waiting: bool
    """Whether the collective has not completed, so that this rank waits for other ranks."""
    has_started: bool = True
    """False if it has not been recorded, because the function that starts it has not returned."""

    def __str__(self) -> str:
        if not self.has_started:
            return (
                f"waiting in the start of {self.operation} in group {self.group} (NCCL creates a "
                "communicator once all of its ranks start their first collective or message in it)"
            )
        state = "waiting in" if self.is_waiting else "completed"
        return f"{state} {self.operation} #{self.sequence} of group {self.group}"


def last_collective() -> LastCollective | None:
    """Return this process's newest collective; None if torch has recorded none."""
    newest: list[tuple[int, LastCollective]] = []
    for dump in _DUMP_FUNCTIONS:
        try:
            trace = json.loads(getattr(_distributed_c10d, dump)(True, False))
        except (AttributeError, RuntimeError, ValueError):  # private functions may be absent
            continue
        for entry in (trace.get("entries") or [])[-1:]:
            newest.append((int(entry.get("time_created_ns", 0)), _read(entry, trace)))
    return max(newest, key=lambda pair: pair[0])[1] if newest else None


def unstarted_collective() -> LastCollective | None:
    """Return a collective or message that a thread of this process cannot start; None if none.

    Threads that wait in groups of an earlier generation do not count.
    """
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None and frame.f_code.co_filename != dist.distributed_c10d.__file__:
            frame = frame.f_back
        if frame is None or "group" not in (names := frame.f_locals):
            continue
        group = names["group"] or dist.group.WORLD
        ranks = group and dist.distributed_c10d._world.pg_group_ranks.get(group)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if group and ranks and "wait(" not in line:
            name = f"{group.group_desc or group.group_name} {list(ranks)}"
            return LastCollective(frame.f_code.co_name, name, 0, is_waiting=True, has_started=False)
    return None


def _read(entry: dict[str, Any], trace: dict[str, Any]) -> LastCollective:
    name, description = (*entry.get("process_group", ("?", "")), "")[:2]
    ranks = trace.get("pg_config", {}).get(str(name), {}).get("ranks", "")
    operation = str(entry.get("profiling_name", "?")).partition(":")[2] or "?"
    return LastCollective(
        operation=operation,
        group=f"{description or name} {ranks}".strip(),
        sequence=int(entry.get("collective_seq_id", 0) or entry.get("p2p_seq_id", 0)),
        is_waiting=entry.get("state") != _COMPLETED and not entry.get("retired", False),
    )
