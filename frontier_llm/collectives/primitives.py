"""All-gather, all-reduce and reduce-scatter of floating-point tensors, asynchronous.

Gathers and scatters are either collectives of the backend, as on a GPU, or `pairwise`:
point-to-point messages between all pairs of ranks. On a CPU, pairwise messages are several times as
fast as gloo's collectives, whose buffers pass through its worker threads. Parts of different
lengths are always sent as point-to-point messages.

Traffic counts the bytes under the `name` of the collective.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from frontier_llm.collectives.handles import DONE, Handle, HandleGroup
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import (
    all_reduce_bytes,
    gather_bytes,
    pairs_sent,
    ring_sent,
    unequal_sent,
)


def all_gather(
    buffer: torch.Tensor,
    group: dist.ProcessGroup,
    traffic: Traffic,
    name: str,
    unquantised_bytes: float | None = None,
    bounds: Sequence[int] = (),
    *,
    pairwise: bool,
) -> Handle:
    """Fill a buffer, in place, from the parts that the ranks of a group hold.

    Collective over `group`; returns at once. `buffer` must not be touched until `wait()`.

    Args:
        buffer: [n], n divisible by the number of ranks. Part i belongs to the group's i-th rank:
            this rank's part is read, the others are overwritten.
        unquantised_bytes: bytes this rank would send without quantisation; None if `buffer` is
            not quantised.
        bounds: first element of each part, and at last n; empty = parts of equal length.
    """
    if buffer.numel() == 0:
        return DONE
    ranks = tuple(dist.get_process_group_ranks(group))
    parts = _split(buffer, len(ranks), bounds)
    own_part = parts[group.rank()]
    if pairwise or bounds:
        sent_bytes = own_part.nbytes * (len(ranks) - 1)
        traffic.count(pairs_sent, name, ranks, sent_bytes, unquantised_bytes)
        return _send_to_all([own_part] * len(ranks), parts, group)
    ring_bytes = gather_bytes(buffer.nbytes, len(ranks))
    traffic.count(ring_sent, name, ranks, ring_bytes, unquantised_bytes)
    work = dist.all_gather_into_tensor(buffer, own_part, group=group, async_op=True)
    assert work is not None
    return work


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, traffic: Traffic, name: str
) -> Handle:
    """Replace a contiguous tensor by its sum over a group.

    Collective over `group`; returns at once. `tensor` must not be touched until `wait()`.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1 or tensor.numel() == 0:
        return DONE
    traffic.count(ring_sent, name, ranks, all_reduce_bytes(tensor.nbytes, len(ranks)))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def sum_together(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, traffic: Traffic, name: str
) -> None:
    """Replace tensors by their sums over a group, in one collective; blocks."""
    if not tensors or group.size() == 1:
        return
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    all_reduce(joined, group, traffic, name).wait()
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, summed in zip(tensors, joined.split(sizes), strict=True):
        tensor.copy_(summed.view(tensor.shape))


class ReduceScatter:
    """A reduce-scatter that has started. The sum is computed in fp32, whatever dtype is sent.

    Collective over `group`, whose i-th rank receives the sum of all ranks' part i.

    Each rank sends every other rank the part which that rank sums. This sends as many bytes as a
    ring, but rounds each element only once, before it is sent. (gloo's reduce_scatter_tensor sends
    as many bytes as an all-reduce.) For fp32 the backend's own reduce-scatter is used, unless
    messages are pairwise.

    Args:
        buffer: [n], n divisible by the number of ranks, fp32 or bf16. It must not be touched until
            `wait()`. If it is fp32, this rank's part may be overwritten with the sum.
        out: [elements of this rank's part] fp32, overwritten with the sum; it may be this rank's
            part of `buffer`. None: an fp32 `buffer` receives the sum in this rank's part; otherwise
            the sum is a new tensor.
        bounds: first element of each part, and at last n; empty = parts of equal length.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        name: str,
        out: torch.Tensor | None = None,
        bounds: Sequence[int] = (),
        *,
        pairwise: bool,
    ) -> None:
        size, ranks = group.size(), tuple(dist.get_process_group_ranks(group))
        self._position, self._out = group.rank(), out
        self._parts = _split(buffer, size, bounds)  # kept alive until sent
        own = self._parts[self._position]
        self._uses_backend = not pairwise and not bounds and buffer.dtype == torch.float32
        if self._uses_backend:
            traffic.count(ring_sent, name, ranks, gather_bytes(buffer.nbytes, size))
            self._sum = torch.empty_like(own) if out is None else out
            work = dist.reduce_scatter_tensor(self._sum, buffer, group=group, async_op=True)
            assert work is not None
            self._work: Handle = work
            return
        received = own.new_empty(size, own.numel())
        self._received = received.unbind()
        if bounds:
            sent_bytes = [part.nbytes for part in self._parts]
            traffic.count(unequal_sent, name, ranks, sent_bytes)
            self._work = _send_to_all(self._parts, self._received, group)
        else:
            traffic.count(pairs_sent, name, ranks, gather_bytes(buffer.nbytes, size))
            self._work = exchange(buffer.view(size, -1), received, group, pairwise=pairwise)

    def wait(self) -> torch.Tensor:
        """Return [elements of this rank's part] fp32: its sum over the group."""
        self._work.wait()
        if self._uses_backend:
            return self._sum
        own, others = self._parts[self._position], self._received
        others = others[: self._position] + others[self._position + 1 :]
        if self._out is None:
            total = own.float()  # no copy if it is fp32
        elif others and own.dtype == torch.float32:
            total = torch.add(own, others[0], out=self._out)
            others = others[1:]
        else:
            total = self._out.copy_(own)
        for part in others:
            total.add_(part)
        return total


def exchange(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, *, pairwise: bool
) -> Handle:
    """Send row i to the i-th rank of a group and receive one row from each; returns at once.

    Both are [ranks, elements]. This rank's own row of `received` is undefined afterwards.
    """
    if pairwise:
        return _send_to_all(sent.unbind(), received.unbind(), group)
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    assert work is not None
    return work


def _split(buffer: torch.Tensor, count: int, bounds: Sequence[int]) -> Sequence[torch.Tensor]:
    if not bounds:
        return buffer.view(count, -1).unbind()
    return [buffer[start:end] for start, end in pairwise(bounds)]


def _send_to_all(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Handle:
    """Send tensor i to the group's i-th rank and receive tensor i from it, for all other ranks.

    Tensors without elements are not sent.
    """
    ranks, position = dist.get_process_group_ranks(group), group.rank()
    others = [(position + step) % len(ranks) for step in range(1, len(ranks))]
    receives = [(received[i], ranks[i]) for i in reversed(others) if received[i].numel()]
    sends = [(sent[i], ranks[i]) for i in others if sent[i].numel()]
    if sent[position].device.type == "cpu":
        works = [dist.irecv(tensor, peer, group=group) for tensor, peer in receives]
        works += [dist.isend(tensor, peer, group=group) for tensor, peer in sends]
        return HandleGroup([work for work in works if work is not None])
    # on a GPU all messages start together: one after the other, they could wait for each other
    operations = [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in receives]
    operations += [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sends]
    return HandleGroup(dist.batch_isend_irecv(operations)) if operations else DONE
