"""Every way to cut the model states is the same computation as one process."""

import functools
from typing import Any

import pytest

from tests.covering import covering
from tests.ranks import in_turn, run_ranks
from tests.trainer.test_parity import MODELS, check, train_and_collect
from tests.values import THREE_LEVELS, tiny_values

pytestmark = pytest.mark.slow

STEPS = 3
"""The first without an order to follow, the others with one; two updates to be wrong in."""

Chain = tuple[int, int, int]
"""Replicas over which parameters, gradients and optimizer states are cut."""


def chains(data: int) -> list[Chain]:
    divisors = [d for d in range(1, data + 1) if data % d == 0]
    return [
        (p, g, o) for o in divisors for g in divisors for p in divisors
        if o % g == 0 and g % p == 0
    ]  # fmt: skip


def factors(chain: Chain) -> list[str]:
    names = ("params", "grads", "optimizer")
    return [f"sharding.{name}={value}" for name, value in zip(names, chain, strict=True)]


COVERED = [(1, 1, 2), (1, 4, 4), (2, 2, 2)]
"""Chains of four replicas whose hops others have: (1, 2, 2) sums over some replicas, (1, 1, 4) and
(1, 2, 4) reduce to the states, (2, 2, 4) and (4, 4, 4) gather parameters."""


@functools.cache
def trained(
    size: int, data: int, overrides: tuple[str, ...], are_covered: bool = False
) -> dict[Chain, list[Any]]:
    """Train with the chains of `data` replicas; return per chain what each rank found."""
    selected = [chain for chain in chains(data) if (data == 4 and chain in COVERED) == are_covered]
    cases = [(tiny_values(*overrides, *factors(chain)), "fp32", STEPS) for chain in selected]
    by_rank = run_ranks(in_turn, size, train_and_collect, cases, timeout=300)
    return dict(zip(selected, map(list, zip(*by_rank, strict=True)), strict=True))


def compare(size: int, data: int, chain: Chain, overrides: list[str], model: list[str]) -> None:
    results = trained(size, data, (*model, *overrides), data == 4 and chain in COVERED)
    check(results[chain], overrides, model, STEPS)


@pytest.mark.parametrize("chain", covering(chains(4), COVERED), ids=str)
def test_every_chain_of_four_replicas(chain: Chain) -> None:
    compare(4, 4, chain, ["model.layers=3"], [])


@pytest.mark.parametrize("ranks_per_node", covering([2, 4], [2]))
@pytest.mark.parametrize("chain", [(1, 1, 8), (2, 4, 8), (8, 8, 8)], ids=str)
def test_chains_that_are_divided_at_packages_and_nodes(chain: Chain, ranks_per_node: int) -> None:
    overrides = [*THREE_LEVELS, "data.global_batch=16", "model.layers=3"]
    results = over_nodes(ranks_per_node, tuple(overrides))
    check(results[chain], overrides, [], STEPS)


@functools.cache
def over_nodes(ranks_per_node: int, overrides: tuple[str, ...]) -> dict[Chain, list[Any]]:
    """Train with some chains of 8 replicas on several nodes."""
    selected = [(1, 1, 8), (2, 4, 8), (8, 8, 8)]
    cases = [(tiny_values(*overrides, *factors(chain)), "fp32", STEPS) for chain in selected]
    by_rank = run_ranks(in_turn, 8, train_and_collect, cases, ranks_per_node=ranks_per_node)
    return dict(zip(selected, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", chains(6), ids=str)
def test_every_chain_of_six_replicas(chain: Chain) -> None:
    overrides = ["data.global_batch=12", "model.layers=3"]
    compare(6, 6, chain, overrides, MODELS["untied_gqa_swiglu"])


IN_3D = [
    "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "data.global_batch=4",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", chains(2), ids=str)
@pytest.mark.parametrize(("chunks", "model"), [(1, "tied_gelu"), (2, "untied_gqa_swiglu")])
def test_every_chain_in_three_dimensions(chain: Chain, chunks: int, model: str) -> None:
    """The default run has the same chains with the collectives of a GPU, below."""
    compare(8, 2, chain, [*IN_3D, f"parallel.chunks={chunks}"], MODELS[model])


BACKEND = "collectives.pairwise=false"
"""Gathers and scatters are the backend's collectives, as on a GPU."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", chains(4), ids=str)
def test_every_chain_with_the_collectives_of_a_gpu(chain: Chain) -> None:
    compare(4, 4, chain, ["model.layers=3", BACKEND], [])


@pytest.mark.parametrize("chain", chains(2), ids=str)
def test_three_dimensions_with_the_collectives_of_a_gpu(chain: Chain) -> None:
    overrides = [*IN_3D, "parallel.chunks=2", BACKEND]
    compare(8, 2, chain, overrides, MODELS["untied_gqa_swiglu"])
