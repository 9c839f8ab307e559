"""Records what ranks launch: every collective and message, in the order of the calls.

`recording` replaces the functions of torch.distributed in a process and in those that it forks, and
each rank appends to a file of its own. `operations` turns the records into operations of the model
of devices (device_model.py), of which a rank starts the next one only when the last one has ended.
If all ranks come to their ends, one order of all launches agrees with the order of each rank.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from frontier_llm.collectives import primitives
from frontier_llm.parallel.lanes import BATCH, call_sites
from frontier_llm.trainer import connect
from tests.parallel.device_model import Operation, Part

COLLECTIVES = {
    "all_reduce": "ring", "all_gather_into_tensor": "ring", "reduce_scatter_tensor": "ring",
    "broadcast": "ring", "all_gather": "ring", "gather": "ring", "scatter": "ring",
    "barrier": "ring", "all_to_all_single": "exchange",
}  # fmt: skip
"""Collectives, and whether ranks exchange messages with their neighbours in a ring or with all."""
MESSAGES = ("isend", "irecv", "send", "recv")


class Event(NamedTuple):
    """A call of a rank."""

    kind: str
    """`ring`, `exchange`, `messages`, or the name of a mark."""
    group: str = ""
    """Name of the process group, the same on its ranks."""
    ranks: tuple[int, ...] = ()
    """Ranks of the group."""
    peers: tuple[tuple[int, bool], ...] = ()
    """Of messages: the other rank, and whether this rank sends."""


class _Recorder:
    """Appends the events of a process to a file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._depth = folder, 0

    def write(self, event: Event) -> None:
        path = self._folder / f"{dist.get_rank()}.{os.getpid()}"
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def call(self, event: Event | None, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Record an outer call, and run it."""
        if event is not None and not self._depth and len(event.ranks) > 1:
            self.write(event)
        self._depth += 1
        try:
            return function(*args, **kw)
        finally:
            self._depth -= 1

    def collective(self, name: str, original: Any) -> Any:
        """Return a collective that is recorded."""

        @functools.wraps(original)
        def call(*args: Any, **kw: Any) -> Any:
            group = kw.get("group") or next(
                (a for a in args if isinstance(a, dist.ProcessGroup)), None
            )
            return self.call(Event(COLLECTIVES[name], *_group(group)), original, *args, **kw)

        return call

    def message(self, name: str, original: Any) -> Any:
        """Return a message that is recorded."""

        @functools.wraps(original)
        def call(tensor: Any, *args: Any, **kw: Any) -> Any:
            peer = args[0] if args else kw.get("dst", kw.get("src"))
            group = kw.get("group") or (args[1] if len(args) > 1 else None)
            peers = ((peer, "send" in name),)
            event = None if peer is None else Event("messages", *_group(group), peers)
            return self.call(event, original, tensor, *args, **kw)

        return call

    def batch(self, original: Any) -> Any:
        """Return `batch_isend_irecv`, recorded."""

        def call(operations: Sequence[Any]) -> Any:
            peers = tuple((one.peer, one.op is dist.isend) for one in operations)
            event = Event("messages", *_group(operations[0].group), peers)
            return self.call(event, original, operations)

        return call

    def to_all(self, original: Any) -> Any:
        """Return `primitives._send_to_all`, recorded as one batch, which it is on a GPU."""

        def call(sent: Any, received: Any, group: Any) -> Any:
            name, ranks = _group(group)
            own, pairs = ranks[group.rank()], [(True, sent), (False, received)]
            peers = tuple(
                (rank, is_send)
                for is_send, tensors in pairs
                for rank, one in zip(ranks, tensors, strict=True)
                if one.numel() and rank != own
            )
            event = Event("messages", name, ranks, peers) if peers else None
            return self.call(event, original, sent, received, group)

        return call

    def connecting(self, original: Any) -> Any:
        """Return `check_groups` with marks around it."""

        def call(*arguments: Any) -> None:
            self.write(Event("connecting"))
            original(*arguments)
            self.write(Event("connected"))

        return call


def _group(group: Any) -> tuple[str, tuple[int, ...]]:
    group = group or dist.group.WORLD
    return group.group_name, tuple(dist.get_process_group_ranks(group))


@contextmanager
def recording(folder: Path) -> Iterator[_Recorder]:
    """Record what this process, and the processes that it forks, launch in this context."""
    recorder = _Recorder(folder)
    changed = {name: recorder.collective(name, getattr(dist, name)) for name in COLLECTIVES}
    changed |= {name: recorder.message(name, getattr(dist, name)) for name in MESSAGES}
    changed[BATCH] = recorder.batch(dist.batch_isend_irecv)
    send_to_all = recorder.to_all(primitives._send_to_all)
    check_groups = recorder.connecting(connect.check_groups)
    with (
        mock.patch.multiple(dist, **changed),
        mock.patch.multiple(dist.distributed_c10d, **changed),
        mock.patch.object(primitives, "_send_to_all", send_to_all),
        mock.patch.object(connect, "check_groups", check_groups),
        ExitStack() as stack,
    ):
        for module, name, function in call_sites():
            if name != function:  # megatron-core has functions of torch under names of its own
                stack.enter_context(mock.patch.object(module, name, changed[function]))
        yield recorder


def processes(folder: Path) -> list[tuple[int, list[Event]]]:
    """Return the rank and the events of each process, in order."""
    return [
        (
            int(path.name.split(".")[0]),
            [
                Event(kind, group, tuple(ranks), tuple(map(tuple, peers)))
                for kind, group, ranks, peers in map(json.loads, path.read_text().splitlines())
            ],
        )
        for path in sorted(folder.iterdir())
    ]


def events(folder: Path) -> dict[int, list[Event]]:
    """Return the events of each rank, if each was one process."""
    listed = processes(folder)
    assert len(listed) == len(dict(listed))
    return dict(listed)


def operations(recorded: Mapping[int, Sequence[Event]]) -> list[list[Operation]]:
    """Return what each rank launches, for a device that does one thing at a time."""
    return [_of_rank(rank, recorded[rank]) for rank in sorted(recorded)]


def _of_rank(rank: int, listed: Sequence[Event]) -> list[Operation]:
    counts: Counter[Any] = Counter()
    found = []
    for event in listed:
        if not event.ranks:
            continue
        keys: list[Any] = [(event.group, "collective")]
        if event.kind == "messages":
            keys = [
                (event.group, *((rank, peer) if is_send else (peer, rank)))
                for peer, is_send in event.peers
            ]
        parts = []
        for key in keys:
            counts[key] += 1
            parts.append(Part((key, counts[key])))
        found.append(Operation("all", tuple(parts)))
    return found
