"""The messages between the stages of a pipeline, and when each stage launches them.

On a GPU, what a rank launches can wait in one queue of the device, whatever streams it was launched
on, and a message waits until the other stage has launched its side of it. Stages must therefore
launch their actions and messages, one by one, as parts of one common order. Then whatever waits,
waits only for what is earlier in this order, so nothing waits forever: not in any assignment of
streams to queues, not if a launch waits for earlier ones to complete, and not if the first message
between two stages waits on the host until both have launched it.

The common order is found by running the schedule with nominal costs and with the strictest rules: a
stage either computes or exchanges messages, and after an action it sends the result before it does
anything else, as soon as the stage that reads it does not compute. Such an order hardly delays
actions even if a device runs everything it gets in one queue.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from frontier_llm.geometry.pipeline_schedule import Action, Placement

COSTS = {"forward": 1, "backward": 2, "input_gradients": 1, "weight_gradients": 1}
"""Nominal costs of actions by kind. They decide where in a program messages are, and no more."""


class Message(NamedTuple):
    """An activation, or the gradient of one, of a micro-batch."""

    forward: bool
    """Whether it is an activation, which goes to the next model chunk."""
    chunk: int
    """Index, in the order of the forward pass, of the model chunk that reads the message."""
    micro_batch: int


class Launch(NamedTuple):
    """A message that a stage launches."""

    message: Message
    stage: int
    """The stage at the other end."""
    is_send: bool
    delivered: int = 0
    """Of a receive: how many messages of this stage the other one has read before it sends."""


Program = tuple[Action | Launch, ...]
"""What a stage does in one run of a schedule, in order."""


def programs(placement: Placement, lists: Sequence[Sequence[Action]]) -> tuple[Program, ...]:
    """Return the program of each stage, from its actions in order.

    Raises:
        RuntimeError: the stages wait for each other.
    """
    items: list[list[Action | Launch]] = [[] for _ in lists]
    read = [[0] * len(lists) for _ in lists]  # by stage: messages it has read, by sender
    delivered: dict[Message, int] = {}
    for stage, item in _CommonOrder(placement, lists).items():
        if isinstance(item, Message):
            receiver = placement.stage(item.chunk)
            items[stage].append(Launch(item, receiver, is_send=True))
            items[receiver].append(Launch(item, stage, is_send=False, delivered=delivered[item]))
            continue
        items[stage].append(item)
        needed, message = _input(placement, stage, item), result(placement, stage, item)
        if needed is not None:
            read[stage][_sender(placement, needed)] += 1
        if message is not None:
            delivered[message] = read[stage][placement.stage(message.chunk)]
    return tuple(map(tuple, items))


def received_early(program: Program) -> Program:
    """Return a program that launches receives before the action that they follow.

    Messages of gloo, which no queue blocks, then arrive while the stage computes.
    """
    items: list[Action | Launch] = []
    for item in program:
        if isinstance(item, Launch) and not item.is_send:
            at = len(items)
            while at and isinstance(items[at - 1], Launch):
                at -= 1
            items.insert(max(0, at - 1), item)
        else:
            items.append(item)
    return tuple(items)


class _CommonOrder:
    """Runs a schedule with nominal costs, by the rules in the docstring of this module."""

    def __init__(self, placement: Placement, lists: Sequence[Sequence[Action]]) -> None:
        self._placement = placement
        self._left = [iter(actions) for actions in lists]
        self._next = [next(actions, None) for actions in self._left]
        self._running: list[Action | None] = [None] * len(lists)
        self._sending: list[Message | None] = [None] * len(lists)
        self._senders: defaultdict[int, set[int]] = defaultdict(set)  # that wait, by receiver
        self._arrived: set[Message] = set()
        self._ends: list[tuple[int, int]] = []  # of running actions, each with its stage

    def items(self) -> Iterator[tuple[int, Action | Message]]:
        """Yield actions and messages, each with the stage that computes or sends it."""
        now, idle = 0, set(range(len(self._left)))
        while idle:
            yield from self._exchange(idle)
            yield from self._start(idle, now)
            idle = set()
            if self._ends:
                now = self._ends[0][0]
            while self._ends and self._ends[0][0] == now:
                idle.add(self._end(heapq.heappop(self._ends)[1]))
        if any(self._next):
            raise RuntimeError("the pipeline stages wait for each other")

    def _exchange(self, idle: set[int]) -> Iterator[tuple[int, Message]]:
        """Send what can be sent. Adds the stages to `idle` that may start an action afterwards."""
        for stage in sorted(idle):
            for sender in sorted(self._senders[stage] | {stage}):
                message = self._sending[sender]
                receiver = stage if message is None else self._placement.stage(message.chunk)
                if message is None or self._running[receiver] is not None:
                    continue
                self._sending[sender] = None
                self._senders[receiver].discard(sender)
                self._arrived.add(message)
                idle |= {sender, receiver}
                yield sender, message

    def _start(self, idle: set[int], now: int) -> Iterator[tuple[int, Action]]:
        """Start the next actions of stages that have sent their results and got their inputs."""
        for stage in sorted(idle):
            action = self._next[stage]
            if action is None or self._running[stage] or self._sending[stage]:
                continue
            needed = _input(self._placement, stage, action)
            if needed is None or needed in self._arrived:
                self._running[stage], self._next[stage] = action, next(self._left[stage], None)
                heapq.heappush(self._ends, (now + COSTS[action.kind], stage))
                yield stage, action

    def _end(self, stage: int) -> int:
        action, self._running[stage] = self._running[stage], None
        assert action is not None
        message = result(self._placement, stage, action)
        receiver = stage if message is None else self._placement.stage(message.chunk)
        if receiver != stage:
            self._sending[stage] = message
            self._senders[receiver].add(stage)
        return stage


def result(placement: Placement, stage: int, action: Action) -> Message | None:
    """Return the message with the result of an action; None if no other chunk reads the result."""
    kind, virtual_stage, micro_batch = action
    chunk = placement.chunk(stage, virtual_stage)
    if kind == "forward" and chunk < placement.chunks - 1:
        return Message(True, chunk + 1, micro_batch)
    if kind in ("backward", "input_gradients") and chunk > 0:
        return Message(False, chunk - 1, micro_batch)
    return None


def _input(placement: Placement, stage: int, action: Action) -> Message | None:
    """Return the message that an action reads; None if it reads no result of another stage."""
    if action.kind == "weight_gradients":
        return None
    chunk, is_forward = placement.chunk(stage, action.virtual_stage), action.kind == "forward"
    message = Message(is_forward, chunk, action.micro_batch)
    is_end = chunk == (0 if is_forward else placement.chunks - 1)
    return None if is_end or _sender(placement, message) == stage else message


def _sender(placement: Placement, message: Message) -> int:
    return placement.stage(message.chunk + (-1 if message.forward else 1))
