"""Sends activations and their gradients between the stages of a pipeline.

A stage sends without waiting, and posts its receives ahead, in the order in which the other stage
sends. Messages between two stages therefore never wait for each other in opposite orders, whatever
the order in which the schedule reads them. A sent tensor is kept until it has arrived, which the
next message from the stage that reads it shows.

NCCL matches the messages of a communicator by their order alone; each direction between two stages
has a communicator of its own (`Groups.ascending` and `Groups.descending`, parallel/groups.py). gloo
matches messages by a tag.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm.geometry.stage_messages import Arrival, Message
from frontier_llm.parallel.groups import Groups

POSTED = 2
"""Receives from each stage that are posted ahead."""


class StageExchange:
    """The messages that one stage exchanges with others in one run of a schedule."""

    def __init__(
        self,
        groups: Groups,
        arrivals: Sequence[Arrival],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Post the first receives.

        Args:
            groups: process groups of this rank.
            arrivals: what this stage receives.
            shape: of every message.
            dtype: of every message.
            device: of every message.
        """
        self._groups, self._shape = groups, shape
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._ranks = dist.get_process_group_ranks(groups.pipeline)
        self._unposted: dict[int, deque[Message]] = {}
        for arrival in arrivals:
            self._unposted.setdefault(arrival.sender, deque()).append(arrival.message)
        self._arrivals = {arrival.message: arrival for arrival in arrivals}
        self._posted: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        # messages under way, and the number of messages that have arrived, by the stage that reads
        self._sent: defaultdict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        self._delivered: Counter[int] = Counter()
        for stage in self._unposted:
            for _ in range(POSTED):
                self._post(stage)

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor. On a GPU only the current stream waits."""
        sender, _, delivered = self._arrivals[message]
        while message not in self._posted:
            self._post(sender)
        work, tensor = self._posted.pop(message)
        self._post(sender)
        work.wait()
        while self._delivered[sender] < delivered:
            self._free(sender)
        return tensor

    def send(self, message: Message, tensor: torch.Tensor, stage: int) -> None:
        """Start to send a message to a stage. The tensor must not be written to afterwards."""
        tensor, group = tensor.contiguous(), self._group(self._own_stage, stage)
        work = dist.isend(tensor, self._ranks[stage], group, tag(message))
        assert work is not None
        sent = self._sent[stage]
        sent.append((work, tensor))
        while sent and sent[0][0].is_completed():  # with gloo, only waiting completes a send
            self._free(stage)

    def finish(self) -> None:
        """Wait until all messages are sent."""
        assert not self._posted, f"messages were not read: {sorted(self._posted)}"
        for stage, sent in self._sent.items():
            while sent:
                self._free(stage)

    def _free(self, stage: int) -> None:
        """Free the oldest message to a stage, which has arrived or must be waited for."""
        work, _ = self._sent[stage].popleft()
        work.wait()
        self._delivered[stage] += 1

    @property
    def _own_stage(self) -> int:
        return self._groups.coordinates.pipeline

    def _post(self, stage: int) -> None:
        """Post the next receive from a stage, if there is one."""
        if not self._unposted[stage]:
            return
        message, tensor = self._unposted[stage].popleft(), torch.empty(self._shape, **self._options)
        group = self._group(stage, self._own_stage)
        work = dist.irecv(tensor, self._ranks[stage], group, tag(message))
        assert work is not None
        self._posted[message] = (work, tensor)

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        """Return the group in whose communicator of these two stages this direction sends."""
        return self._groups.ascending if sender < receiver else self._groups.descending


def tag(message: Message) -> int:
    """Return a number that no other message of a step has; gloo matches messages by it."""
    return (message.micro_batch << 12 | message.chunk) << 1 | message.forward
