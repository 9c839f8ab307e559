"""All-gathers of equal shards, in place and asynchronously."""

import torch
import torch.distributed as dist

from frontier_llm.collectives.handle import DONE, Handle
from frontier_llm.collectives.messages import by_messages
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import gather_bytes


def all_gather(
    whole: torch.Tensor,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
    name: str,
    unquantised_bytes: float | None = None,
) -> Handle:
    """Fill a buffer from the parts that each rank of a group already holds in it.

    Collective over `group`; returns at once. `whole` must not be touched until `wait()`.

    Args:
        whole: [n], n divisible by the ranks; this rank's part, at its place in the group's order,
            is read, the others are overwritten.
        group: the ranks that hold the parts, in order; None = this rank alone.
        traffic: where the bytes are counted.
        name: under which they are counted.
        unquantised_bytes: what this rank would send of what `whole` stands for; absent = the same.
    """
    if group is None or whole.numel() == 0:
        return DONE
    ranks = dist.get_process_group_ranks(group)
    total_bytes = whole.numel() * whole.element_size()
    sent_bytes = gather_bytes(total_bytes, len(ranks))
    parts = whole.view(len(ranks), -1)
    mine = group.rank()
    if whole.device.type != "cpu":
        traffic.ring(name, tuple(ranks), sent_bytes, unquantised_bytes)
        work = dist.all_gather_into_tensor(whole, parts[mine], group=group, async_op=True)
        assert work is not None
        return work
    traffic.pairs(name, tuple(ranks), sent_bytes, unquantised_bytes)
    return by_messages([parts[mine]] * len(ranks), parts.unbind(), group)
