"""A model of the queues of GPUs, in which messages between ranks may block each other.

It follows what is documented of the hardware, of NCCL and of torch:

- The host launches operations on streams. A stream runs its operations one after another, and the
  device maps streams to hardware queues. The first operation of a queue blocks those behind it
  until it has started, also if they are of other streams (CUDA: false dependencies, as in NVIDIA's
  sample simpleHyperQ), or until it has ended (HIP, whose packets have the barrier bit set).
- A kernel of NCCL starts when what its stream waits for has ended, and then occupies its queue
  until the other ranks have started their side. A send may end before it is received ("eager"), if
  the message fits into the buffers, or not.
- The host can launch about 1,024 kernels ahead on CUDA; then a launch blocks.
- The first message of a communicator blocks the host until all its ranks have made the call:
  torch's ProcessGroupNCCL creates communicators at first use, and NCCL opens connections so.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LAUNCH_LIMIT = 1024
"""Kernels that a host can launch ahead on CUDA."""


class Part(NamedTuple):
    """One rank's side of a message or of a collective."""

    key: Hashable
    """The message or the collective; all ranks that take part have a part with this key."""
    is_send: bool = False


class Operation(NamedTuple):
    """What a host launches with one call."""

    stream: Hashable
    parts: tuple[Part, ...] = ()
    """Empty = kernels that need no other rank."""
    after: tuple[int, ...] = ()
    """Earlier operations of the rank, by their number, for which it waits on the device."""
    seconds: float = 0.0
    kernels: int = 1
    communicator: Hashable = None
    """What the host must have created together with all ranks that ever use it."""


@dataclass(frozen=True)
class Device:
    """How the devices of all ranks run what is launched."""

    queue: Callable[[int, Hashable], Hashable] = lambda _, stream: stream
    """Hardware queue of a stream on a rank. By default every stream has one of its own."""
    in_order: bool = False
    """Whether an operation starts only when those before it in its queue have ended."""
    eager: bool = False
    """Whether a send ends before it is received."""
    launch_limit: int | None = None
    """Kernels that the host may launch ahead."""
    is_lazy: bool = False
    """Whether communicators are created by the first message."""


@dataclass
class Run:
    """The outcome of a simulation."""

    waiting: dict[int, Operation] = field(default_factory=dict)
    """By rank that waits forever, the first operation that does not end."""
    seconds: float = 0.0


def simulate(ranks: Sequence[Sequence[Operation]], device: Device) -> Run:
    """Run the operations of all ranks until all have ended, or nothing can go on."""
    shared = _Shared.of(ranks, device)
    simulated = [_Rank(number, listed, shared) for number, listed in enumerate(ranks)]
    while any([rank.go_on() for rank in simulated]):  # a list: every rank gets its turn
        pass
    ends = [end for rank in simulated for end in rank.ends.values()]
    waiting = {rank.number: first for rank in simulated if (first := rank.first_waiting)}
    return Run(waiting, max(ends, default=0.0))


@dataclass
class _Shared:
    """What ranks know of each other."""

    device: Device
    sides: Counter[Hashable]
    """Number of ranks that take part in a message or collective."""
    members: dict[Hashable, set[int]]
    """Ranks of a communicator."""
    started: defaultdict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[Hashable, float] = field(default_factory=dict)
    called: defaultdict[Hashable, set[int]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Operation]], device: Device) -> "_Shared":
        members: defaultdict[Hashable, set[int]] = defaultdict(set)
        sides: Counter[Hashable] = Counter()
        for number, listed in enumerate(ranks):
            for operation in listed:
                sides.update(part.key for part in operation.parts)
                if operation.communicator is not None:
                    members[operation.communicator].add(number)
        return cls(device, sides, dict(members))

    def is_created(self, communicator: Hashable, rank: int) -> bool:
        """Let a host call for a communicator; return whether the call returns."""
        if not self.device.is_lazy or communicator is None:
            return True
        self.called[communicator].add(rank)
        return self.called[communicator] == self.members[communicator]

    def met_at(self, part: Part) -> float | None:
        """Return when a part need no longer wait for other ranks; None = it still must."""
        if self.device.eager and part.key in self.sent:
            return self.sent[part.key]
        starts = self.started[part.key]
        return max(starts) if len(starts) == self.sides[part.key] else None


class _Rank:
    """The host and the queues of one rank."""

    def __init__(self, number: int, listed: Sequence[Operation], shared: _Shared) -> None:
        self.number, self._listed, self._shared = number, listed, shared
        self._launched = self._pending = 0
        self._queues: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._free: defaultdict[Hashable, float] = defaultdict(float)  # when a queue goes on
        self._before: dict[int, int] = {}  # the operation before it in its stream
        self._last: dict[Hashable, int] = {}
        self._starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}

    @property
    def first_waiting(self) -> Operation | None:
        """The first operation that does not end; None if all do."""
        left = [index for index in range(len(self._listed)) if index not in self.ends]
        return self._listed[left[0]] if left else None

    def go_on(self) -> bool:
        """Launch, start and end what is possible; return whether there was anything."""
        has_moved = self._launch_all()
        for name in list(self._queues):
            has_moved |= self._run(name)
        return has_moved

    def _launch_all(self) -> bool:
        first, limit = self._launched, self._shared.device.launch_limit
        while self._launched < len(self._listed):
            operation = self._listed[self._launched]
            is_full = limit and self._pending and self._pending + operation.kernels > limit
            if is_full or not self._shared.is_created(operation.communicator, self.number):
                break
            if operation.stream in self._last:
                self._before[self._launched] = self._last[operation.stream]
            self._last[operation.stream] = self._launched
            queue = self._shared.device.queue(self.number, operation.stream)
            self._queues[queue].append(self._launched)
            self._launched, self._pending = self._launched + 1, self._pending + operation.kernels
        return self._launched > first

    def _run(self, name: Hashable) -> bool:
        """Start and end operations of a queue; return whether there was any."""
        has_moved, in_order = False, self._shared.device.in_order
        for index in list(self._queues[name]):
            if index not in self._starts:
                if not self._start(index, name):
                    break  # it blocks those behind it
                has_moved = True
            if self._end(index, name):
                has_moved = True
            elif in_order:
                break
        return has_moved

    def _start(self, index: int, queue: Hashable) -> bool:
        operation = self._listed[index]
        needed = [*operation.after, *([self._before[index]] if index in self._before else [])]
        if any(one not in self.ends for one in needed):
            return False
        start = max([self._free[queue], *(self.ends[one] for one in needed)])
        self._starts[index] = self._free[queue] = start
        for part in operation.parts:
            self._shared.started[part.key].append(start)
            if part.is_send:
                self._shared.sent[part.key] = start
        return True

    def _end(self, index: int, queue: Hashable) -> bool:
        operation = self._listed[index]
        met = [self._shared.met_at(part) for part in operation.parts]
        if None in met:
            return False
        latest = max([self._starts[index], *(moment for moment in met if moment is not None)])
        self.ends[index] = latest + operation.seconds
        self._pending -= operation.kernels
        self._queues[queue].remove(index)
        if self._shared.device.in_order:
            self._free[queue] = self.ends[index]
        return True
