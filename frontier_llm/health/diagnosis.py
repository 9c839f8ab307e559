"""Describes what every rank does when a run hangs or has lost a rank, and names the ranks at fault.

The watchdog of each rank makes a `RankState`. One watchdog collects the states of all ranks and
calls `explain_stall` or `explain_loss`.

A state includes the last collective of the process, from torch's flight recorder, which keeps the
last 2,000 in memory, including those that megatron starts. With gloo, it does not record messages
between two ranks. With NCCL, it records a collective when its kernel has been started. The first
collective of a group is not recorded while it creates the communicator, which needs all ranks of
the group: it is found in the stacks.
"""

import json
import linecache
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from frontier_llm.launch.world import World
from frontier_llm.units import format_seconds

_STACK_LINES = 3
"""Number of innermost stack frames in a message. The stall file has the full stacks."""
_WAITING_CODE = (".wait()", ".tolist()", "torch/distributed/", "batch_isend_irecv")
"""Texts that occur in the innermost stack frame of a rank that waits for a message."""
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


@dataclass(frozen=True)
class Phase:
    """What the main thread of a rank is doing, and how long this may take."""

    name: str
    """`startup`, `groups`, `step`, `checkpoint`, `evaluation` or another name; messages show it."""
    step: int
    """The last step that the rank has started; 0 before the first."""
    started: float
    """Monotonic clock of the rank, in seconds."""
    limit_seconds: float
    """Time limit in seconds. A phase that takes longer is a stall."""


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when the alarm was raised."""

    rank: int
    host: str
    phase: str
    step: int
    seconds: float
    """Seconds since the start of the phase."""
    collective: LastCollective | None
    stack: tuple[str, ...]
    """Stack of the main thread, outermost frame first."""

    @classmethod
    def now(cls, world: World, phase: Phase, lost: BaseException | None = None) -> "RankState":
        """Describe this process; may be called from any of its threads.

        `lost` is the error by which this rank lost contact with another rank, in this phase.
        """
        return cls(
            rank=world.rank,
            host=world.host,
            phase=f"{phase.name} (lost contact)" if lost else phase.name,
            step=phase.step,
            seconds=time.monotonic() - phase.started,
            collective=unstarted_collective() or last_collective(),
            stack=tuple(traceback.format_tb(lost.__traceback__)) if lost else _main_stack(),
        )

    def to_json(self) -> str:
        """Return the state as JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankState":
        """Read the output of `to_json`."""
        values = json.loads(text)
        collective = values["collective"] and LastCollective(**values["collective"])
        return cls(**{**values, "collective": collective, "stack": tuple(values["stack"])})

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks, in a collective or for a message.

        torch does not record gloo's messages between two ranks. A rank that waits for such a
        message is recognised by its innermost stack frame.
        """
        in_collective = self.collective is not None and self.collective.is_waiting
        return in_collective or any(text in self._innermost_frame for text in _WAITING_CODE)

    @property
    def activity(self) -> str:
        """Description of what the rank does. Ranks that do the same have the same text."""
        if self.collective is not None and self.collective.is_waiting:
            return f"{self.phase}; {self.collective}"
        verb = "waiting" if self.is_waiting else "busy"
        last = f", last collective: {self.collective}" if self.collective else ""
        return f"{self.phase}; {verb} at {self._source_line}{last}"

    @property
    def _innermost_frame(self) -> str:
        return self.stack[-1] if self.stack else ""

    @property
    def _source_line(self) -> str:
        found = re.search(r'([^/"]+)", line (\d+)', self._innermost_frame)
        return f"{found[1]}:{found[2]}" if found else "an unknown line"

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host}: step {self.step}, for "
            f"{format_seconds(self.seconds)}: {self.activity}"
        )


def late_ranks(
    states: Mapping[int, RankState], size: int, closed: Collection[int] = ()
) -> list[int]:
    """Return the ranks that the others wait for.

    The first of these kinds that occurs is returned:

    1. ranks that did not report, and are not in `closed`: those have left the work that is watched;
    2. ranks that compute while other ranks wait;
    3. ranks in an earlier step than others;
    4. ranks in an earlier collective than the other ranks of the same process group.

    The list is empty if none occurs, so that all ranks wait in the same place.
    """
    silent = [rank for rank in range(size) if rank not in states and rank not in closed]
    if silent:
        return silent
    busy = [state.rank for state in states.values() if not state.is_waiting]
    if 0 < len(busy) < len(states):
        return sorted(busy)
    first = min(state.step for state in states.values())
    behind = sorted(state.rank for state in states.values() if state.step == first)
    return behind if len(behind) < len(states) else _behind_in_group(states.values())


def explain_stall(
    states: Mapping[int, RankState],
    world: World,
    alarm: Phase,
    file: str,
    closed: Collection[int] = (),
) -> str:
    """Return a message of a few lines: what stalled, which ranks are late, what the others do.

    It names the file with all states; `alarm` is the phase that took too long.
    """
    late = late_ranks(states, world.size, closed)
    lines = [
        f"stall: {alarm.name} of step {alarm.step} took longer than "
        f"{format_seconds(alarm.limit_seconds)} (limits: watchdog.*); "
        + (f"late: {world.name_ranks(late)}" if late else "all ranks wait in the same place")
    ]
    for rank in late[:4]:
        lines += _describe_late(rank, states)
    lines += _activities(state for rank, state in sorted(states.items()) if rank not in late)
    return "\n".join([*lines, f"  state and stack of every rank: {file}"])


def explain_loss(
    states: Mapping[int, RankState],
    world: World,
    error: str,
    file: str,
    closed: Collection[int] = (),
) -> str:
    """Return a message that names the ranks that are gone, after the rank of `world` lost contact.

    It names the file with all states, and the network error of this rank.
    """
    gone = [rank for rank in range(world.size) if rank not in states and rank not in closed]
    if gone:
        verb = "is" if len(gone) == 1 else "are"
        head = (
            f"{world.name_ranks(gone)} {verb} gone without an error message: killed (out of "
            "memory?), or the node failed"
        )
    else:
        head = (
            "ranks lost contact with each other, but all of them still run: check the network "
            "between their hosts"
        )
    lines = [head, f"  {world.name_ranks([world.rank])} noticed it: {error}"]
    lines += _activities(state for _, state in sorted(states.items()))
    return "\n".join([*lines, f"  state and stack of every rank: {file}"])


def explain_lost_store(world: World, phase: Phase, error: str | None) -> str:
    """Return a message of one line, for a rank that gets no diagnosis from the store on rank 0.

    `error` is the network error by which it lost contact with another rank, if it did.
    """
    place = f"{phase.name} of step {phase.step}"
    event = f"lost contact with another rank in {place} ({error})"
    if error is None:
        seconds = time.monotonic() - phase.started
        event = f"has been in {place} for {seconds:.0f} s (limit: {phase.limit_seconds:.0f} s)"
    return (
        f"stall: rank {world.rank} ({world.host}) {event}, and the store of "
        f"{world.name_ranks([0])} at {world.master_address} does not answer: rank 0 is stopped or "
        "dead, or this host is cut off from the network"
    )


def format_states(states: Mapping[int, RankState], size: int) -> str:
    """Return the states and stacks of all ranks, as they are written to the stall file."""
    parts = []
    for rank in range(size):
        state = states.get(rank)
        if state is None:
            parts.append(f"rank {rank}: did not report\n")
        else:
            parts.append(f"{state}\n{''.join(state.stack)}")
    return "\n".join(parts)


def _describe_late(rank: int, states: Mapping[int, RankState]) -> list[str]:
    state = states.get(rank)
    if state is None:
        return [f"  rank {rank}: did not report: it is stopped, dead or cut off from the network"]
    stack = "".join(state.stack[-_STACK_LINES:]).rstrip().splitlines()
    return [f"  {state}", *(f"  {line}" for line in stack)]


def _activities(states: Iterable[RankState]) -> list[str]:
    """Return one line per activity with the ranks that do it; at most four lines."""
    by_activity: dict[str, list[int]] = defaultdict(list)
    for state in states:
        by_activity[state.activity].append(state.rank)
    return [
        f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:16]))}: {activity}"
        for activity, ranks in list(by_activity.items())[:4]
    ]


def _behind_in_group(states: Iterable[RankState]) -> list[int]:
    by_group: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for state in states:
        if state.collective is not None and state.collective.has_started:
            by_group[state.collective.group].append((state.collective.sequence, state.rank))
    for members in by_group.values():
        newest = max(sequence for sequence, _ in members)
        behind = sorted(rank for sequence, rank in members if sequence < newest)
        if behind:
            return behind
    return []


def _main_stack() -> tuple[str, ...]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return tuple(traceback.format_stack(frame)) if frame else ()
