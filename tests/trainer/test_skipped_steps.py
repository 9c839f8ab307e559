"""A step that is skipped leaves nothing behind, with every optimizer; and mistakes are noticed."""

import functools
from typing import Any

import pytest
import torch

from frontier_llm.engine.update import Update
from frontier_llm.launch.world import World
from frontier_llm.sharding import adafactor
from frontier_llm.sharding.adafactor import Adafactor
from frontier_llm.sharding.muon import Muon
from frontier_llm.sharding.update_groups import update_ranges
from frontier_llm.trainer.progress import Progress
from tests.covering import covering
from tests.ranks import run_ranks
from tests.streams.mutations import Mutation, mutated
from tests.trainer.rig import make_rig
from tests.trainer.test_adafactor import ADAFACTOR
from tests.trainer.test_muon import MUON
from tests.trainer.test_quantised import ZEROPP, go_on, overflow
from tests.trainer.test_sharding_parity import factors
from tests.values import tiny_values

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "adamw": [],
    "adamw_8bit": ["optimizer.name=adamw_8bit"],
    "muon": MUON,
    "adafactor": ADAFACTOR,
    "adafactor with momentum": [*ADAFACTOR, "optimizer.beta1=0.9"],
}


def train(
    world: World, values: dict[str, Any], skips: bool
) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """Train steps 1, 2, 4, 5, and between them step 3, which is skipped, or not at all."""
    rig = make_rig(world, values)
    rig.train(2)
    if skips:
        with rig.spoiled():
            assert rig.train(1, first=2)[0].skipped
    results = rig.train(2, first=3)
    weights = [weight.clone() for _, weight in rig.states.parameters()]
    return [(result.loss, result.grad_norm) for result in results], weights


def values_of(optimizer: str) -> dict[str, Any]:
    small = ("model.layers=2", "data.global_batch=4")
    return tiny_values(*small, *factors((1, 1, 2)), *OPTIMIZERS[optimizer])


@functools.cache
def without(optimizer: str) -> list[Any]:
    return run_ranks(train, 2, values_of(optimizer), False)


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(
        mine == theirs and all(map(torch.equal, weights, others))
        for (mine, weights), (theirs, others) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("optimizer", covering(OPTIMIZERS, ["adafactor with momentum"]))
def test_a_run_goes_on_as_if_a_skipped_step_had_not_been(optimizer: str) -> None:
    assert equal(run_ranks(train, 2, values_of(optimizer), True), without(optimizer))


MISTAKES: dict[str, tuple[str, Mutation]] = {
    "AdamW updates": ("adamw", (update_ranges, "found_inf=skip", "found_inf=None")),
    "AdamW in 8 bits updates": ("adamw_8bit", (update_ranges, "found_inf=skip", "found_inf=None")),
    "Muon changes the momentum": (
        "muon", (Muon._move, "torch.where(skip > 0, momentum, new_momentum)", "new_momentum"),
    ),
    "Muon moves the weights": (
        "muon", (Muon._move, "torch.where(skip > 0, master, new)", "new"),
    ),
    "Adafactor counts": ("adafactor", (Adafactor.update, "+= 1 - skip", "+= 1")),
    "Adafactor changes its moments": (
        "adafactor", (adafactor._decay, "torch.where(skip > 0, moment,", "("),
    ),
    "Adafactor moves the weights": (
        "adafactor", (Adafactor._move, "torch.where(skip > 0, master, kept", "(kept"),
    ),
}  # fmt: skip
"""By name: the optimizer, and the change of the source."""


ONE_OF_A_KIND = ("AdamW updates", "Muon moves the weights", "Adafactor counts")
"""One mistake of each optimizer always runs."""


@pytest.mark.parametrize(
    "mistake", covering(MISTAKES, [name for name in MISTAKES if name not in ONE_OF_A_KIND])
)
def test_mistakes_are_noticed(mistake: str) -> None:
    optimizer, mutation = MISTAKES[mistake]
    arguments = (mutation, train, values_of(optimizer), True)
    assert not equal(run_ranks(mutated, 2, *arguments), without(optimizer))


DIFFERENCES = (*ZEROPP, "collectives.refresh_differences=true")
FEEDBACK = ("collectives=zeropp_feedback", "collectives.sums_format=int4")


GOING_ON = {
    f"{cut}-{name}": (*factors(cut), *formats)
    for cut in ((1, 1, 2), (1, 2, 2))
    for name, formats in (("differences", DIFFERENCES), ("feedback", FEEDBACK))
}


@pytest.mark.parametrize(
    "case", covering(GOING_ON, ["(1, 1, 2)-differences", "(1, 2, 2)-feedback"])
)
def test_a_skipped_step_that_is_saved_is_one_to_go_on_from(case: str) -> None:
    values = tiny_values(*GOING_ON[case])
    for straight, again, once_more in run_ranks(go_on, 2, values, 3, 2, ranks_per_node=1):
        assert straight == again == once_more


def test_parameters_that_are_not_sent_in_full_are_noticed() -> None:
    mutation = (Update.end, "saved or not skipped", "not skipped")
    arguments = (mutation, go_on, tiny_values(*factors((1, 2, 2)), *DIFFERENCES), 3, 2)
    for straight, again, _ in run_ranks(mutated, 2, *arguments, ranks_per_node=1):
        assert straight != again


def test_rounding_errors_that_are_kept_are_noticed() -> None:
    mutation = (Update.end, "self._states.skip()", "pass")
    values = tiny_values(*factors((2, 2, 2)), "collectives=zeropp_feedback")
    found = run_ranks(mutated, 2, mutation, overflow, values, ranks_per_node=1)
    assert max(growth for *_, growth in found) > 2


def test_a_skipped_step_is_a_step_without_an_update() -> None:
    progress = Progress()
    for skipped in (False, True, False):
        progress.advance(8, 16, skipped=skipped, alone=2)
    assert (progress.step, progress.samples, progress.updates) == (3, 24, 2)
    assert progress.cross_attention_updates == 1
