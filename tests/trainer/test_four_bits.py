"""The preset four_bits: copies stay equal, errors do not add up, bytes, skipped steps, resumes."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.cli.experiments import composed
from frontier_llm.config.support import check_support
from frontier_llm.errors import ConfigError
from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import reference
from tests.trainer.test_quantised import exact, go_on, overflow, weights
from tests.trainer.test_sharding_parity import factors
from tests.values import tiny_values

pytestmark = pytest.mark.slow

FOUR_BITS = ("collectives=four_bits", "collectives.refresh_full_every=3")
STEPS = 6


def distances(world: World, values: dict[str, Any], precision: str) -> dict[str, Any]:
    """Train; after each step, return the largest distance of a parameter from its master weight."""
    rig = make_rig(world, values, precision)
    found: dict[str, Any] = {"losses": [], "distance": [], "updates": []}
    before = exact(rig)
    for step in range(STEPS):
        found["losses"] += [result.loss for result in rig.train(1, first=step)]
        held, masters = weights(rig), exact(rig)
        matrices = [name for name in held if held[name].dim() > 1]
        found["distance"].append(max(_gap(held[name], masters[name]) for name in matrices))
        found["updates"].append(max(_gap(before[name], masters[name]) for name in matrices))
        before = masters
    return {**found, "weights": held}


def _gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.float() - second.float()).abs().max())


@pytest.mark.parametrize(
    "cut", covering([(1, 1, 4), (2, 4, 4), (1, 2, 4)], [(1, 1, 4), (1, 2, 4)]), ids=str
)
def test_copies_are_equal_and_follow_the_masters(cut: tuple[int, int, int]) -> None:
    """The distance stays within half a step of int4 of the last update; a full refresh ends it."""
    values = tiny_values(*factors(cut), *FOUR_BITS)
    ranks = run_ranks(distances, 4, values, "fp32", ranks_per_node=2)
    for rank in ranks:
        for name, tensor in rank["weights"].items():
            assert torch.equal(tensor, ranks[0]["weights"][name]), name
        np.testing.assert_allclose(rank["losses"], reference((), STEPS)[0], rtol=1e-2)
        left = 0.0  # the largest distance before a step, which its difference contains as well
        for step in range(STEPS):
            distance = rank["distance"][step]
            if (step + 1) % 3 == 0:
                assert distance == 0
            else:
                assert 0 < distance <= 0.51 * (rank["updates"][step] + left) / 7
            left = distance


def test_in_bf16_differences_that_are_too_small_are_not_lost() -> None:
    """They stay in the difference to the master weight until they are large enough."""
    values = tiny_values(*factors((1, 1, 2)), *FOUR_BITS)
    for rank in run_ranks(distances, 2, values, "bf16", ranks_per_node=1):
        largest = max(float(tensor.abs().max()) for tensor in rank["weights"].values())
        for step, distance in enumerate(rank["distance"]):
            rounding = largest * 2.0**-8
            assert distance <= rounding + 0.51 * max(rank["updates"]) * 8 / 7 / 7, step


def sent(world: World, values: dict[str, Any]) -> dict[str, float]:
    """Return the bits per element that are sent to another node in the second step, by flow."""
    rig = make_rig(world, values)
    layout = rig.model.layout
    elements = sum(layout.unit_sizes(0).values())  # each of the two ranks sends half of them
    rig.train(1)
    counted = rig.train(1, first=1)[0].sent  # by both ranks, with the refresh of the first step
    bits = {name: 8 * sent.network / elements for name, sent in counted.items()}
    return {**bits, "reduce_grads": bits["reduce_grads"] / layout.micro_batches}


def test_gradients_and_refreshes_take_four_bits_between_nodes() -> None:
    values = tiny_values(
        *factors((1, 2, 2)), "collectives=four_bits", "model.hidden=768", "model.layers=2"
    )
    for bits in run_ranks(sent, 2, values, ranks_per_node=1):
        assert 4 < bits["reduce_grads"] <= 4.3
        assert 4 < bits["refresh_params"] <= 4.3


CUTS_AND_PERIODS = list(product([(1, 1, 2), (1, 2, 2)], [3, 50]))


@pytest.mark.parametrize(
    "cases",
    covering([CUTS_AND_PERIODS[1:3], CUTS_AND_PERIODS[::3]], [CUTS_AND_PERIODS[::3]]),
    ids=str,
)
def test_a_saved_state_goes_on_to_the_bit(cases: list[tuple[tuple[int, int, int], int]]) -> None:
    values = [
        (tiny_values(*factors(cut), *FOUR_BITS, f"collectives.refresh_full_every={full_every}"),)
        for cut, full_every in cases
    ]
    for rank in run_ranks(in_turn, 2, go_on, values, ranks_per_node=1):
        for case, (straight, again, once_more) in zip(cases, rank, strict=True):
            assert straight == again == once_more, case


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    values = tiny_values(*factors((1, 2, 2)), *FOUR_BITS)
    for skipped, same, loss, growth in run_ranks(overflow, 2, values, ranks_per_node=1):
        assert skipped == [False, True, False, False]
        assert same
        assert np.isfinite(loss)
        assert growth < 2


@pytest.mark.parametrize("key", ["rotation_elements=24", "refresh_format=bf16"])
def test_what_cannot_be_combined_is_refused(key: str) -> None:
    config = composed("collectives=four_bits", f"collectives.{key}")
    with pytest.raises(ConfigError) as caught:
        check_support(config)
    assert caught.value.key == f"collectives.{key.partition('=')[0]}"
    advised = caught.value.todo.removeprefix("set ").partition(",")[0]
    check_support(composed("collectives=four_bits", f"collectives.{key}", advised))
