"""Limits how many communicators of a rank work at the same time, on GPUs that hang with several.

A kernel of NCCL or RCCL occupies a part of the device until the other ranks have started theirs.
RCCL on MI250X is reported to hang while the kernels of two or three communicators run, although all
ranks launch them in the same order (ROCm/rccl#2191, open in 2026-09). With
`collectives.communicators=few` or `one`, collectives and messages start on one stream, the lane,
and each of them waits there until the one before it has ended. The computation goes on, and waits
only for what it reads. With `few`, the collectives of tensor ranks stay outside the lane: they
block the computation anyway, so at most two communicators work.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    "broadcast", "all_gather",
)  # fmt: skip
"""The functions of torch.distributed by which a run communicates, besides batches of messages."""
BATCH = "batch_isend_irecv"
_replaced: list[tuple[Any, str, Any]] = []
"""Modules and names whose functions use a lane, with the functions that they had before."""


class Lane:
    """Starts collectives and messages one after another, except collectives of a group `outside`.

    Calls must not overlap.
    """

    def __init__(self, outside: dist.ProcessGroup | None = None) -> None:
        self._outside, self._stream = outside, torch.cuda.Stream()

    def collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of torch.distributed that uses the lane."""

        def call(
            *arguments: Any,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
            **options: Any,
        ) -> Any:
            if group is not None and group is self._outside:
                return original(*arguments, group=group, async_op=async_op, **options)
            handle = self._start(
                lambda: [original(*arguments, group=group, async_op=True, **options)], arguments
            )
            if async_op:
                return handle
            handle.wait()
            return None

        return call

    def batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `batch_isend_irecv` with the lane."""

        def call(operations: Sequence[dist.P2POp]) -> list[Any]:
            return [self._start(lambda: original(operations), operations)]

        return call

    def _start(self, start: Callable[[], Sequence[Any]], keeps: Any) -> "_Handle":
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for work in start():
                work.wait()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _Handle(event, keeps)


class _Handle:
    """A collective under way. Its tensors are kept until they can be freed."""

    def __init__(self, event: torch.cuda.Event, keeps: Any) -> None:
        self._event, self._keeps = event, keeps

    def wait(self) -> bool:
        """Let the current stream wait until the collective has ended."""
        torch.cuda.current_stream().wait_event(self._event)
        self._keeps = None
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended."""
        return bool(self._event.query())


def call_sites() -> Iterator[tuple[Any, str, str]]:
    """Yield the module, the name in the module, and the function of torch.distributed it calls."""
    from megatron.core.tensor_parallel import layers, mappings, utils

    for module in (dist, dist.distributed_c10d):
        yield from ((module, name, name) for name in (*COLLECTIVES, BATCH))
    for module in (layers, mappings, utils):  # these hold the functions under names of their own
        yield module, "dist_all_gather_func", "all_gather_into_tensor"
        if module is not utils:
            yield module, "dist_reduce_scatter_func", "reduce_scatter_tensor"


def use_lane(lane: Lane) -> None:
    """Let all collectives and messages of this process use a lane, until `leave_lane`."""
    assert not _replaced
    for module, name, function in list(call_sites()):
        original = getattr(module, name)
        _replaced.append((module, name, original))
        wrapped = lane.batch(original) if function == BATCH else lane.collective(original)
        setattr(module, name, wrapped)


def leave_lane() -> None:
    """Undo `use_lane`."""
    while _replaced:
        setattr(*_replaced.pop())
