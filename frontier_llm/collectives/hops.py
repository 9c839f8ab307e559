"""Gathers over several groups, one after the other."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from frontier_llm.collectives.handles import Steps
from frontier_llm.collectives.primitives import all_gather
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.geometry.wire import gather_bytes


def part_of(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """Return which part this rank holds before a gather over some groups, and how many there are.

    The parts of the first group's ranks lie side by side, in the order of the group; together they
    are one part of the second group, and so on.
    """
    own, count = 0, 1
    for group in groups:
        own, count = own + count * group.rank(), count * group.size()
    return own, count


def narrow(bounds: Sequence[int], group: dist.ProcessGroup) -> tuple[Sequence[int], Sequence[int]]:
    """Return the bounds of the ranks of a group, and the bounds inside the part of this rank.

    Args:
        bounds: first element of each part of a buffer, and at last its size; empty = equal parts.
            The ranks of the group share the parts equally, in their order.
        group: the ranks.
    """
    if not bounds:
        return (), ()
    step = (len(bounds) - 1) // group.size()
    own = bounds[group.rank() * step : (group.rank() + 1) * step + 1]
    return bounds[::step], [bound - own[0] for bound in own]


def gather_hops(
    buffer: torch.Tensor,
    groups: Sequence[dist.ProcessGroup],
    traffic: Traffic,
    name: str,
    unquantised_part_bytes: int | None = None,
    bounds: Sequence[int] = (),
    *,
    pairwise: bool,
) -> Steps:
    """Gather in place, over one group after the other.

    Before a hop over a group of k ranks this rank holds a run of neighbouring parts that contains
    its own; after the hop it holds a run that is k times as long.

    Args:
        buffer: [n], with as many parts as the product of the groups' sizes.
        groups: the groups.
        traffic: counts the bytes.
        name: the collective under which the bytes are counted.
        unquantised_part_bytes: size of a part before encoding; None if it is not encoded.
        bounds: first element of each part, and at last n; empty = parts of equal length.
        pairwise: whether to send point-to-point messages; only on a CPU.
    """
    own, count = part_of(groups)
    run, parts = 1, bounds or range(0, buffer.numel() + 1, buffer.numel() // count)
    for group in groups:
        step, run = run, run * group.size()
        first = own // run * run
        span = buffer[parts[first] : parts[first + run]]
        unquantised = None
        if unquantised_part_bytes is not None:
            unquantised = gather_bytes(run * unquantised_part_bytes, group.size())
        of_span = [bound - parts[first] for bound in bounds[first : first + run + 1 : step]]
        yield all_gather(span, group, traffic, name, unquantised, of_span, pairwise=pairwise)
