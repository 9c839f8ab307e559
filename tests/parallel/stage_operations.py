"""What the ranks of a pipeline launch in one run of a schedule, for the model of their devices.

Each stage has tensor ranks, which exchange activations in the middle of every action, and data
ranks, which gather parameters before an action and reduce gradients after it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.geometry.pipeline_schedule import Action, Placement
from frontier_llm.geometry.stage_messages import Launch, Message, Program
from tests.parallel.device_model import Operation, Part

FORWARD_KERNELS, BACKWARD_KERNELS = 28, 40
"""Kernels of a layer in a forward and in a backward pass, which are counted in docs/gpu.md."""
SEND_SECONDS, COLLECTIVE_SECONDS = 0.05, 0.1
"""Where the forward pass of a model chunk takes one second."""
COMPUTE: Hashable = "compute"


@dataclass(frozen=True)
class Job:
    """A job whose ranks run a schedule."""

    placement: Placement
    programs: Sequence[Program]
    """By stage."""
    layers: int = 4
    """Layers of a model chunk."""
    width: int = 1
    """Tensor ranks of a stage, and as many data ranks."""
    directions: bool = False
    """Whether each direction between two stages has a communicator of its own."""

    def operations(self) -> list[list[Operation]]:
        """Return what each rank launches."""
        return [
            _Rank(self, stage, tensor, data).operations
            for stage in range(self.placement.stages)
            for tensor in range(self.width)
            for data in range(self.width)
        ]


class _Rank:
    """Lists the operations of one rank."""

    def __init__(self, job: Job, stage: int, tensor: int, data: int) -> None:
        self._job, self._stage, self._tensor, self._data = job, stage, tensor, data
        self.operations: list[Operation] = []
        self._computed: tuple[int, ...] = ()  # the last computation
        self._received: dict[Message, tuple[int, Launch]] = {}
        self._sent: defaultdict[int, deque[int]] = defaultdict(deque)
        self._delivered: Counter[int] = Counter()
        self._collectives = 0
        for item in job.programs[stage]:
            if isinstance(item, Launch):
                self._launch(item)
            else:
                self._compute(item)

    def _add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _launch(self, one: Launch) -> None:
        stream: Hashable = "stages"
        if self._job.directions:
            stream = (self._stage, one.stage)[:: 1 if one.is_send else -1]
        part = Part((one.message, self._tensor, self._data), one.is_send)
        index = self._add(
            Operation(
                stream,
                (part,),
                self._computed,
                SEND_SECONDS,
                communicator=(stream, self._tensor, self._data),
            )
        )
        if one.is_send:
            self._sent[one.stage].append(index)
        else:
            self._received[one.message] = index, one

    def _compute(self, action: Action) -> None:
        after = [*self._computed, *self._inputs(action), self._collective("data", self._computed)]
        seconds = {"forward": 1, "backward": 2}.get(action.kind, 1)
        of_layer = FORWARD_KERNELS if action.kind == "forward" else BACKWARD_KERNELS
        half, kernels = seconds / 2, of_layer * self._job.layers // 2
        first = self._add(Operation(COMPUTE, (), tuple(after), half, kernels))
        exchanged = self._collective("tensor", (first,))
        last = self._add(Operation(COMPUTE, (), (first, exchanged), half, kernels))
        self._computed = (last,)
        if action.kind != "forward":
            self._collective("data", self._computed)

    def _inputs(self, action: Action) -> Iterator[int]:
        """Yield the messages for which the device waits before an action."""
        chunk = self._job.placement.chunk(self._stage, action.virtual_stage)
        message = Message(action.kind == "forward", chunk, action.micro_batch)
        if action.kind == "weight_gradients" or message not in self._received:
            return
        index, launch = self._received.pop(message)
        yield index
        while self._delivered[launch.stage] < launch.delivered:
            yield self._sent[launch.stage].popleft()
            self._delivered[launch.stage] += 1

    def _collective(self, axis: str, after: tuple[int, ...]) -> int:
        """Add a collective of the ranks along an axis."""
        self._collectives += 1
        group = (axis, self._stage, self._data if axis == "tensor" else self._tensor)
        part = Part((*group, self._collectives))
        return self._add(Operation(axis, (part,), after, COLLECTIVE_SECONDS, communicator=group))


def posted_ahead(placement: Placement, programs: Sequence[Program], count: int) -> list[Program]:
    """Return programs in which receives are launched ahead, instead of in the common order.

    For each other stage, the first `count` receives are launched before the first action, and one
    more whenever one of them is read. With `count` = 0 a receive is launched when it is needed.
    """
    return [
        tuple(_ahead(placement, stage, program, count)) for stage, program in enumerate(programs)
    ]


def _ahead(
    placement: Placement, stage: int, program: Program, count: int
) -> Iterator[Action | Launch]:
    receives = [item for item in program if isinstance(item, Launch) and not item.is_send]
    left: dict[int, deque[Launch]] = defaultdict(deque)
    for one in receives:
        left[one.stage].append(one)
    sender = {one.message: one.stage for one in receives}
    posted: set[Message] = set()

    def post(other: int, most: int) -> Iterator[Launch]:
        for _ in range(min(most, len(left[other]))):
            one = left[other].popleft()
            posted.add(one.message)
            yield one

    for other in list(left):
        yield from post(other, count)
    for item in program:
        if isinstance(item, Launch):
            yield from [item] if item.is_send else []
            continue
        chunk = placement.chunk(stage, item.virtual_stage)
        needed = Message(item.kind == "forward", chunk, item.micro_batch)
        reads = item.kind != "weight_gradients" and needed in sender
        while reads and needed not in posted:
            yield from post(sender[needed], 1)
        yield item
        yield from post(sender[needed], min(count, 1)) if reads else ()
