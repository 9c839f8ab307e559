"""The table of what is supported: its refusals are refused, and what it calls tested runs."""

import functools
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest

from docs.generate import collectives_page
from docs.generate.collectives_page import TESTED_DEVICES
from frontier_llm.config import decode
from frontier_llm.config.support import check_support
from frontier_llm.errors import ConfigError
from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import make_rig
from tests.values import tiny_values

pytestmark = pytest.mark.slow

PIPELINES = {
    "none": ["model.layers=2"],
    "1f1b": ["model.layers=2", "parallel.pipeline=2"],
    "interleaved": ["parallel.pipeline=2", "parallel.chunks=2"],
}
RANKS, PER_NODE = 4, 2
Cell = Mapping[str, str]
"""A combination: one value per axis, by the name of the axis."""
AXES = {
    "sharding": ("replicated", "zero1", "zero2", "zero3", "mics", "zeropp", "levels"),
    "pipeline": tuple(PIPELINES),
    **collectives_page.AXES,
}
KEEP_ERRORS = ("zeropp_feedback", "four_bits", "levels")
"""Presets that are refused in fp16."""


def cells() -> Iterator[Cell]:
    """Yield every combination of the axes."""
    for values in product(*AXES.values()):
        yield dict(zip(AXES, values, strict=True))


def overrides(cell: Cell) -> dict[str, Any]:
    chosen = [f"{axis}={cell[axis]}" for axis in ("sharding", "precision", "collectives")]
    small = ("data.global_batch=4", "precision.initial_loss_scale=1024")
    return tiny_values(*small, *chosen, *PIPELINES[cell["pipeline"]])


def telling() -> Iterator[Cell]:
    """Choose tested cells until each preset has run with every value of every other axis.

    Without the plain one: test_sharding_parity.py runs that.
    """
    tested = [
        cell
        for cell in cells()
        if cell["device"] in TESTED_DEVICES
        and cell["collectives"] != "plain"
        and not (cell["precision"] == "fp16" and cell["collectives"] in KEEP_ERRORS)
    ]
    left = {pair for cell in tested for pair in pairs(cell)}
    while left:
        best = max(tested, key=lambda cell: len(left & pairs(cell)))
        left -= pairs(best)
        yield best


def pairs(cell: Cell) -> set[Any]:
    return {(cell["collectives"], axis, value) for axis, value in cell.items()}


TELLING = list(telling())
PARTS = [
    cell
    for cell in TELLING
    if cell["collectives"] in ("qwz", "qgz", "zeropp_feedback", "four_bits")
]
"""Cells whose formats are also those of other presets, or have tests of their own."""


def name_of(cell: Cell) -> str:
    return "-".join(cell.values())


def train(world: World, values: dict[str, Any], precision: str) -> list[float]:
    rig = make_rig(world, values, precision)
    batches = rig.batches(0)  # the same ones again: the loss must fall
    return [rig.step.run(step, batches, 3e-3).loss for step in (1, 2)]


@functools.cache
def trained(are_parts: bool) -> dict[str, list[list[float]]]:
    """Train the cells that always run, or the others, on one set of ranks."""
    chosen = [cell for cell in TELLING if (cell in PARTS) == are_parts]
    cases = [(overrides(cell), cell["precision"]) for cell in chosen]
    by_rank = run_ranks(in_turn, RANKS, train, cases, ranks_per_node=PER_NODE, timeout=240)
    return dict(zip(map(name_of, chosen), map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("cell", covering(TELLING, PARTS), ids=name_of)
def test_what_is_called_tested_trains(cell: Cell) -> None:
    ranks = trained(cell in PARTS)[name_of(cell)]
    assert all(rank == ranks[0] for rank in ranks)
    first, second = ranks[0]
    assert second < first


def test_what_is_refused_is_refused_with_a_way_out() -> None:
    combinations = product(AXES["precision"], AXES["collectives"])
    found = {pair: collectives_page.refusal(*reversed(pair)) for pair in combinations}
    refused = {pair: error for pair, error in found.items() if error is not None}
    assert refused.keys() == {("fp16", preset) for preset in KEEP_ERRORS}
    for error in refused.values():
        assert error.key == "collectives.error_feedback"
        assert "collectives.error_feedback=false" in error.todo


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (["collectives.error_feedback=true"], "collectives.error_feedback"),
        (["collectives=zeropp_feedback", "collectives.grads_across_format=bf16"],
         "collectives.error_feedback"),
    ],
)  # fmt: skip
def test_formats_that_make_no_sense_together_are_refused(changed: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_support(decode(tiny_values(*changed)))
    assert caught.value.key == key


def test_the_axes_are_the_choices_of_conf() -> None:
    from frontier_llm.cli.compose import groups

    assert set(AXES["collectives"]) == set(groups()["collectives"])
    assert set(AXES["sharding"]) == {
        name
        for name in groups()["sharding"]
        if not name.startswith("amsp")  # factors like these
    }
    assert set(AXES["precision"]) == set(groups()["precision"]) - {"auto"}
