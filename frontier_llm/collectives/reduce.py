"""Sums over a group, in place and asynchronously."""

import torch
import torch.distributed as dist

from frontier_llm.collectives.handle import DONE, Handle
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import all_reduce_bytes


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, traffic: Traffic, name: str
) -> Handle:
    """Add `tensor` up over a group, in place.

    Collective over `group`; returns at once. `tensor` must not be touched until `wait()`.

    Args:
        tensor: any shape, contiguous; overwritten with the sum.
        group: the ranks that add up.
        traffic: where the bytes are counted.
        name: under which they are counted.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1 or tensor.numel() == 0:
        return DONE
    total_bytes = tensor.numel() * tensor.element_size()
    traffic.ring(name, ranks, all_reduce_bytes(total_bytes, len(ranks)))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work
