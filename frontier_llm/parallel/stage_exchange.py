"""Sends activations and their gradients between the stages of a pipeline.

A stage sends without waiting, and posts its receives ahead, in the order in which the other stage
sends. Messages between two stages therefore never wait for each other in opposite orders, whatever
the order in which the schedule reads them. NCCL matches the messages of a communicator by their
order alone; each direction between two stages has a communicator of its own (`Groups.ascending` and
`Groups.descending`, parallel/groups.py). gloo matches messages by a tag.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm.geometry.stage_messages import Incoming, Message
from frontier_llm.parallel.groups import Groups

POSTED = 2
"""Receives from each stage that are posted ahead."""


class StageExchange:
    """The messages that one stage exchanges with others in one run of a schedule."""

    def __init__(
        self,
        groups: Groups,
        messages: Incoming,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Post the first receives.

        Args:
            groups: process groups of this rank.
            messages: what this stage receives.
            shape: of every message.
            dtype: of every message.
            device: of every message.
        """
        self._groups, self._shape = groups, shape
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._ranks = dist.get_process_group_ranks(groups.pipeline)
        self._unposted: dict[int, deque[Message]] = {}
        for stage, message in messages:
            self._unposted.setdefault(stage, deque()).append(message)
        self._senders = {
            message: stage for stage, messages in self._unposted.items() for message in messages
        }
        self._posted: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for stage in self._unposted:
            for _ in range(POSTED):
                self._post(stage)

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor. On a GPU only the current stream waits."""
        stage = self._senders[message]
        while message not in self._posted:
            self._post(stage)
        work, tensor = self._posted.pop(message)
        self._post(stage)
        work.wait()
        return tensor

    def send(self, message: Message, tensor: torch.Tensor, stage: int) -> None:
        """Start to send a message to a stage. The tensor must not be written to afterwards."""
        tensor, group = tensor.contiguous(), self._group(self._own_stage, stage)
        work = dist.isend(tensor, self._ranks[stage], group, tag(message))
        assert work is not None
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        assert not self._posted, f"messages were not read: {sorted(self._posted)}"
        while self._sent:
            self._sent.popleft()[0].wait()

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
