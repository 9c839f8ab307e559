"""Use all process groups of a rank at the same time, as a training step does."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.health.preflight import Trial
from frontier_llm.parallel.groups import Groups
from frontier_llm.sharding.unit import StateGroups
from frontier_llm.trainer.connect import message_pairs

ROUNDS, ELEMENTS = 20, 2**18
"""Messages per group and connection that are under way at the same time, and their fp32 numbers."""


def concurrent_use(groups: Groups, state_groups: StateGroups, layout: ResolvedLayout) -> Trial:
    """Return a trial of all groups of this rank at the same time."""
    tied = [group for group in state_groups.tied_groups.values() if group is not None]
    context = [] if groups.context is None else [groups.context.group]
    used = [dist.group.WORLD, groups.tensor, *context, *tied, *state_groups.groups.values()]
    several = [group for group in used if group is not None and group.size() > 1]
    ranks, stage = groups.grid.pipeline_group(groups.rank), groups.coordinates.pipeline
    partners = [ranks[low + high - stage] for low, high in message_pairs(groups, layout)]
    return _trial(list(dict.fromkeys(several)), partners, groups.pipeline)


def _trial(
    groups: Sequence[dist.ProcessGroup], partners: Sequence[int], pipeline: dist.ProcessGroup
) -> Trial:
    """Return a trial in which the groups and connections of a rank communicate at the same time.

    A step does so. Communicators that work alone may hang together, for example on MI250X
    (ROCm/rccl#2191). Groups and partners must be in one order of all ranks.
    """

    def run(device: torch.device) -> tuple[float, float]:
        own = torch.full((ELEMENTS,), _number(dist.get_rank()), device=device)
        works: list[dist.Work | None] = []
        results, expected = [], 0.0
        for _ in range(ROUNDS):
            for group in groups:
                results.append(own.clone())
                expected += sum(map(_number, dist.get_process_group_ranks(group)))
                works.append(dist.all_reduce(results[-1], group=group, async_op=True))
            for partner in partners:
                results.append(torch.empty_like(own))
                expected += _number(partner)
                send = dist.P2POp(dist.isend, own, partner, pipeline)
                receive = dist.P2POp(dist.irecv, results[-1], partner, pipeline)
                works += dist.batch_isend_irecv([send, receive])
        for work in works:
            if work is not None:
                work.wait()
        return sum(result.double().mean().item() for result in results), expected

    everything = tuple(range(dist.get_world_size()))
    return Trial("all groups at the same time", everything, run)


def _number(rank: int) -> float:
    """Return a number of a rank whose sums over all ranks are exact in fp32."""
    return rank % 7 + 1.0
