"""Messages between all pairs of a group's ranks: on gloo several times as fast as its collectives.

What gloo gathers or exchanges passes through its worker threads, buffer by buffer; messages go
straight from tensor to tensor. Where there is a GPU nothing here is used for gathers.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from frontier_llm.collectives.handle import Handle, Together


def by_messages(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Handle:
    """Send every other rank of a group its tensor, and receive one from each; returns at once.

    Args:
        sent: one for each rank, in the group's order; this rank's own is not looked at.
        received: the same, overwritten; this rank's own is left alone.
        group: the ranks.
    """
    ranks, mine = dist.get_process_group_ranks(group), group.rank()
    others = [(mine + step) % len(ranks) for step in range(1, len(ranks))]
    receives = [dist.irecv(received[i], ranks[i], group=group) for i in reversed(others)]
    sends = [dist.isend(sent[i], ranks[i], group=group) for i in others]
    return Together([work for work in (*receives, *sends) if work is not None])


def exchange(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> Handle:
    """Send every other rank its row, and receive one from each; returns at once.

    Args:
        sent: [ranks, m].
        received: [ranks, m], overwritten; what this rank's own row holds then is not defined.
        group: the ranks, in the order of the rows.
    """
    if sent.device.type == "cpu":
        return by_messages(sent.unbind(), received.unbind(), group)
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    assert work is not None
    return work
