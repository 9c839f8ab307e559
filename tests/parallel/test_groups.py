"""Random numbers depend on seed, step and coordinates alone; groups follow the partition."""

from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.parallel.groups import _shared_groups, make_groups, make_hop_groups
from frontier_llm.parallel.megatron_cpu import install
from tests.ranks import run_ranks
from tests.values import tiny_values


def draw(world: World, values: dict[str, Any]) -> dict[str, Any]:
    install()
    layout = ResolvedLayout.resolve(
        RunConfig.model_validate(values), world.size, world.ranks_per_node
    )
    groups = make_groups(layout.grid, layout.head_stage)

    def numbers(seed: int, own_masks: bool = False) -> tuple[float, float]:
        groups.seed_dropout(seed, own_masks=own_masks)
        shared = torch.rand(()).item()
        with get_cuda_rng_tracker().fork():
            return shared, torch.rand(()).item()

    first, second, again = numbers(1), numbers(2), numbers(1)
    assert first == again
    assert first != second
    in_sequence = numbers(1, own_masks=True)
    assert in_sequence[1] == first[1]
    return {"shared": first[0], "divided": first[1], "in_sequence": in_sequence[0]}


def test_masks_differ_between_parts_of_a_tensor() -> None:
    one, other = run_ranks(draw, 2, tiny_values("parallel.tensor=2"))
    assert one["shared"] == other["shared"]
    assert one["divided"] != other["divided"]
    assert one["in_sequence"] != other["in_sequence"]


def hop_ranks(world: World, values: dict[str, Any]) -> dict[str, Any]:
    install()
    layout = ResolvedLayout.resolve(
        RunConfig.model_validate(values), world.size, world.ranks_per_node
    )
    groups = make_groups(layout.grid, layout.head_stage)
    made = make_hop_groups(groups, Factors(2, 2, 4, 4))
    mine = groups.grid.data_group(world.rank)
    expected = {hop: [mine[i] for i in hop.group(groups.coordinates.data)] for hop in made}
    found = {hop: torch.distributed.get_process_group_ranks(group) for hop, group in made.items()}
    assert found == expected
    return {hop.digit: ranks for hop, ranks in found.items()}


def test_hop_groups_are_those_of_the_partition() -> None:
    found = run_ranks(hop_ranks, 8, tiny_values("parallel.tensor=2"))
    assert found[0] == {"params": [0, 2], "optimizer": [0, 4]}


def ask_twice(world: World) -> list[bool]:
    pairs = [[0, 1], [1, 2], [0, 1], [0, 1, 2]]
    own = parallel_state.create_group
    with _shared_groups(timedelta(minutes=1), []):
        first, _, again, all_three = (parallel_state.create_group(ranks) for ranks in pairs)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=all_three)
    given_back = parallel_state.create_group is own
    return [given_back, first is again, first is all_three, total.item() == 3]


def test_one_group_is_created_for_the_same_ranks() -> None:
    assert run_ranks(ask_twice, 3) == [[True, True, False, True]] * 3
