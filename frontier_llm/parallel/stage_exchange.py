"""Sends activations and their gradients between the stages of a pipeline.

Messages are launched in the order of a program (geometry/stage_messages.py), which is part of one
order of all stages, so that no queue of a device can block them. A stage that receives waits only
when it reads. A sent tensor is kept until it has arrived, which the next message from the stage
that reads it shows.

All messages of a stage use the communicator of its pipeline. Each is launched as a batch of its
own: torch would create a communicator of two ranks for a message that is in no batch, and in a
larger batch NCCL may send one message after another, in an order of its own. NCCL matches the
messages of two ranks by their order, and gloo by a tag.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm.geometry.stage_messages import Launch, Message
from frontier_llm.parallel.groups import Groups


class StageExchange:
    """The messages that one stage exchanges with others in one run of a schedule.

    `elements` counts those of a message, a flat tensor.
    """

    def __init__(
        self,
        groups: Groups,
        elements: Callable[[Message], int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups, self._elements = groups, elements
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._ranks = dist.get_process_group_ranks(groups.pipeline)
        self._received: dict[Message, tuple[dist.Work, torch.Tensor, Launch]] = {}
        # messages under way, and the number of messages that have arrived, by the stage that reads
        self._sent: defaultdict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        self._delivered: Counter[int] = Counter()

    def launch(self, one: Launch, result: torch.Tensor | None) -> None:
        """Start to send a message, or without a `result` to receive it.

        The result must not be written to afterwards.
        """
        if result is None:
            tensor = torch.empty(self._elements(one.message), **self._options)
        else:
            tensor = result.contiguous()
        operation = dist.P2POp(
            dist.isend if one.is_send else dist.irecv,
            tensor,
            self._ranks[one.stage],
            self._groups.pipeline,
            tag(one.message),
        )
        [work] = dist.batch_isend_irecv([operation])
        if not one.is_send:
            self._received[one.message] = (work, tensor, one)
            return
        sent = self._sent[one.stage]
        sent.append((work, tensor))
        while sent and sent[0][0].is_completed():  # with gloo, only waiting completes a send
            self._free(one.stage)

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor. On a GPU only the current stream waits."""
        work, tensor, launched = self._received.pop(message)
        work.wait()
        while self._delivered[launched.stage] < launched.delivered:
            self._free(launched.stage)
        return tensor

    def finish(self) -> None:
        """Wait until all messages are sent."""
        assert not self._received, f"messages were not read: {sorted(self._received)}"
        for stage, sent in self._sent.items():
            while sent:
                self._free(stage)

    def _free(self, stage: int) -> None:
        """Free the oldest message to a stage, which has arrived or must be waited for."""
        work, _ = self._sent[stage].popleft()
        work.wait()
        self._delivered[stage] += 1


def tag(message: Message) -> int:
    """Return a number that no other message of a step has; gloo matches messages by it."""
    return (message.micro_batch << 12 | message.chunk) << 1 | message.forward
