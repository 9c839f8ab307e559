"""Every way to cut the model states is the same computation as one process."""

import pytest

from tests.trainer.test_parity import MODELS, compare

pytestmark = pytest.mark.slow

STEPS = 3
"""The first without an order to follow, the others with one; two updates to be wrong in."""


def chains(data: int) -> list[tuple[int, int, int]]:
    divisors = [d for d in range(1, data + 1) if data % d == 0]
    return [
        (p, g, o) for o in divisors for g in divisors for p in divisors
        if o % g == 0 and g % p == 0
    ]  # fmt: skip


def factors(chain: tuple[int, int, int]) -> list[str]:
    names = ("params", "grads", "optimizer")
    return [f"sharding.{name}={value}" for name, value in zip(names, chain, strict=True)]


@pytest.mark.parametrize("chain", chains(4), ids=str)
def test_every_chain_of_four_replicas(chain: tuple[int, int, int]) -> None:
    compare(4, ["model.layers=3", *factors(chain)], [], STEPS)


@pytest.mark.parametrize("chain", chains(6), ids=str)
def test_every_chain_of_six_replicas(chain: tuple[int, int, int]) -> None:
    compare(
        6,
        ["data.global_batch=12", "model.layers=3", *factors(chain)],
        MODELS["untied_gqa_swiglu"],
        STEPS,
    )


IN_3D = [
    "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "data.global_batch=4",
]  # fmt: skip


@pytest.mark.parametrize("chain", chains(2), ids=str)
@pytest.mark.parametrize(("chunks", "model"), [(1, "tied_gelu"), (2, "untied_gqa_swiglu")])
def test_every_chain_in_three_dimensions(
    chain: tuple[int, int, int], chunks: int, model: str
) -> None:
    compare(8, [*IN_3D, f"parallel.chunks={chunks}", *factors(chain)], MODELS[model], STEPS)


BACKEND = "collectives.pairwise=false"
"""Gathers and scatters are the backend's collectives, as on a GPU."""


@pytest.mark.parametrize("chain", chains(4), ids=str)
def test_every_chain_with_the_collectives_of_a_gpu(chain: tuple[int, int, int]) -> None:
    compare(4, ["model.layers=3", BACKEND, *factors(chain)], [], STEPS)


@pytest.mark.parametrize("chain", chains(2), ids=str)
def test_three_dimensions_with_the_collectives_of_a_gpu(chain: tuple[int, int, int]) -> None:
    overrides = [*IN_3D, "parallel.chunks=2", BACKEND, *factors(chain)]
    compare(8, overrides, MODELS["untied_gqa_swiglu"], STEPS)
