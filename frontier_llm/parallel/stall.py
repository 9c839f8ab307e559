"""Where every rank stands when a run has stalled or lost a rank, and which rank is at fault."""

import json
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from frontier_llm.parallel.collective_trace import LastCollective, last_collective
from frontier_llm.parallel.world import World
from frontier_llm.units import format_seconds

_STACK_LINES = 3
"""Innermost lines of a stack that a message shows; the file has all."""
_WAITING = (".wait()", ".tolist()", "torch/distributed/", "batch_isend_irecv")
"""In the innermost line of a rank that waits for a message."""


@dataclass(frozen=True)
class Phase:
    """What a rank is doing."""

    name: str
    step: int
    """The last step it began; 0 before the first."""
    started: float
    """By the monotonic clock of the rank."""
    limit_seconds: float


@dataclass(frozen=True)
class RankState:
    """One rank at the moment of the alarm."""

    rank: int
    host: str
    phase: str
    step: int
    seconds: float
    """Since the phase began."""
    collective: LastCollective | None
    stack: tuple[str, ...]
    """Of the main thread, outermost first."""

    @classmethod
    def now(cls, world: World, phase: Phase, lost: BaseException | None = None) -> "RankState":
        """Describe this process, from any of its threads.

        Args:
            world: its place.
            phase: what its main thread does, or did when it lost contact.
            lost: the error by which it lost contact, if it did.
        """
        return cls(
            rank=world.rank,
            host=world.host,
            phase=f"{phase.name} (lost contact)" if lost else phase.name,
            step=phase.step,
            seconds=time.monotonic() - phase.started,
            collective=last_collective(),
            stack=tuple(traceback.format_tb(lost.__traceback__)) if lost else _main_stack(),
        )

    def to_json(self) -> str:
        """Write it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankState":
        """Read what `to_json` wrote."""
        values = json.loads(text)
        made = values["collective"] and LastCollective(**values["collective"])
        return cls(**{**values, "collective": made, "stack": tuple(values["stack"])})

    @property
    def waits(self) -> bool:
        """Whether it waits for others: in a collective, or for a message (gloo traces none)."""
        in_collective = self.collective is not None and self.collective.is_waiting
        return in_collective or any(words in self._innermost for words in _WAITING)

    @property
    def place(self) -> str:
        """What it does, in words that are the same for ranks that do the same."""
        if self.collective is not None and self.collective.is_waiting:
            return f"{self.phase}; {self.collective}"
        verb = "waiting" if self.waits else "busy"
        after = f", {self.collective}" if self.collective else ""
        return f"{self.phase}; {verb} at {self._line}{after}"

    @property
    def _innermost(self) -> str:
        return self.stack[-1] if self.stack else ""

    @property
    def _line(self) -> str:
        found = re.search(r'([^/"]+)", line (\d+)', self._innermost)
        return f"{found[1]}:{found[2]}" if found else "an unknown line"

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host}: step {self.step}, for "
            f"{format_seconds(self.seconds)}: {self.place}"
        )


def late(states: Mapping[int, RankState], size: int) -> list[int]:
    """Choose the ranks that the others wait for.

    In this order: those that gave no word; those that are busy while others wait in a collective;
    those at an earlier step; those at an earlier collective of a group than its other ranks. Empty
    if all stand at the same place.

    Args:
        states: of the ranks that answered.
        size: number of ranks.
    """
    silent = [rank for rank in range(size) if rank not in states]
    if silent:
        return silent
    busy = [state.rank for state in states.values() if not state.waits]
    if 0 < len(busy) < size:
        return sorted(busy)
    first = min(state.step for state in states.values())
    behind = sorted(state.rank for state in states.values() if state.step == first)
    return behind if len(behind) < size else _behind_in_group(states.values())


def explain(states: Mapping[int, RankState], world: World, alarm: Phase, where: str) -> str:
    """Say what stalled, who is late and what the others do, in a few lines.

    Args:
        states: of the ranks that answered.
        world: of any rank.
        alarm: the phase that took too long.
        where: the file with all states.
    """
    culprits = late(states, world.size)
    lines = [
        f"stall: {alarm.name} of step {alarm.step} took longer than "
        f"{format_seconds(alarm.limit_seconds)} (watchdog.*); "
        + (f"late: {world.name_ranks(culprits)}" if culprits else "all ranks wait in one place")
    ]
    for rank in culprits[:4]:
        lines += _about(rank, states)
    lines += _places(state for rank, state in sorted(states.items()) if rank not in culprits)
    return "\n".join([*lines, f"  where every rank stands, with its stack: {where}"])


def explain_loss(states: Mapping[int, RankState], world: World, said: str, where: str) -> str:
    """Say which ranks are gone, after one has lost contact and all were called.

    Args:
        states: of the ranks that answered.
        world: of any rank.
        said: what the network told the rank that called.
        where: the file with all states.
    """
    gone = [rank for rank in range(world.size) if rank not in states]
    if gone:
        verb = "is" if len(gone) == 1 else "are"
        head = (
            f"{world.name_ranks(gone)} {verb} gone without a word: killed (for want of "
            "memory?), or the node is lost"
        )
    else:
        head = "ranks lost contact with one another, yet all of them answer: look at the network"
    lines = [head, f"  {world.name_ranks([world.rank])} was told: {said}"]
    lines += _places(state for _, state in sorted(states.items()))
    return "\n".join([*lines, f"  where every rank stood, with its stack: {where}"])


def page(states: Mapping[int, RankState], size: int) -> str:
    """Write all states and stacks: the file that a stall leaves."""
    parts = []
    for rank in range(size):
        state = states.get(rank)
        if state is None:
            parts.append(f"rank {rank}: gave no word\n")
        else:
            parts.append(f"{state}\n{''.join(state.stack)}")
    return "\n".join(parts)


def _about(rank: int, states: Mapping[int, RankState]) -> list[str]:
    state = states.get(rank)
    if state is None:
        return [f"  rank {rank}: gave no word: it is stopped, dead or cut off from the network"]
    stack = "".join(state.stack[-_STACK_LINES:]).rstrip().splitlines()
    return [f"  {state}", *(f"  {line}" for line in stack)]


def _places(states: Iterable[RankState]) -> list[str]:
    """Gather the ranks that do the same into one line each."""
    places: dict[str, list[int]] = defaultdict(list)
    for state in states:
        places[state.place].append(state.rank)
    return [
        f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:16]))}: {place}"
        for place, ranks in list(places.items())[:4]
    ]


def _behind_in_group(states: Iterable[RankState]) -> list[int]:
    by_group: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for state in states:
        if state.collective is not None:
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
