"""Cut model states in the situations that have bitten others, and proof that the tests bite."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.collectives.primitives import ReduceScatter
from frontier_llm.launch.world import World
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.parameters import Parameters
from frontier_llm.sharding.sharded_states import ShardedStates
from tests.covering import covering
from tests.ranks import RanksFailedError, in_turn, run_ranks
from tests.trainer.evaluation import EvaluationLoader, evaluation
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import (
    MODELS,
    check,
    reference,
    train_and_collect,
    trained,
)
from tests.trainer.test_sharding_parity import STEPS, factors
from tests.values import tiny_values

pytestmark = pytest.mark.slow

Cut = tuple[int, int, int]


def compare_cuts(cut: Cut, cuts: Sequence[Cut], overrides: Sequence[str]) -> None:
    """Compare one of some cuts, which are trained on one set of ranks, with one process."""
    of_cuts = {each: (*overrides, *factors(each)) for each in cuts}
    results = trained(4, tuple(of_cuts.values()), STEPS)[of_cuts[cut]]
    check(results, [*of_cuts[cut]], [], STEPS)


@pytest.mark.parametrize(
    "cut", covering([(1, 2, 4), (2, 4, 4), (4, 4, 4)], [(1, 2, 4), (2, 4, 4)]), ids=str
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation(recompute: str, cut: Cut) -> None:
    cuts = [cut] if cut == (4, 4, 4) else [(1, 2, 4), (2, 4, 4)]
    cases = {
        (each, kind): (f"recompute={kind}", "model.layers=3", *factors(each))
        for kind in ("selective", "full")
        for each in cuts
    }
    overrides = cases[cut, recompute]
    check(trained(4, tuple(cases.values()), STEPS)[overrides], [*overrides], [], STEPS)


ODD_CUTS = [(1, 1, 4), (1, 2, 4), (2, 4, 4), (4, 4, 4)]
ODD_CUTS_COVERED = ODD_CUTS[::2]


@pytest.mark.parametrize("micro_batches", covering([3, 5], [5]))
@pytest.mark.parametrize("cut", covering(ODD_CUTS, ODD_CUTS_COVERED), ids=str)
def test_odd_numbers_of_micro_batches(cut: Cut, micro_batches: int) -> None:
    cuts = [each for each in ODD_CUTS if (each in ODD_CUTS_COVERED) == (cut in ODD_CUTS_COVERED)]
    compare_cuts(cut, cuts, ["model.layers=2", f"data.global_batch={4 * micro_batches}"])


THREE_STAGES = (
    "model.layers=7", "parallel.pipeline=3", "parallel.chunks=2", "data.global_batch=12",
)  # fmt: skip
CUTS_AND_MODELS = [
    ((1, 1, 2), "tied_gelu"),
    ((1, 2, 2), "untied_gqa_swiglu"),
    ((2, 2, 2), "tied_gelu"),
    ((2, 2, 2), "untied_gqa_swiglu"),
]


COVERED = [((1, 1, 2), "tied_gelu"), ((2, 2, 2), "untied_gqa_swiglu")]


@pytest.mark.parametrize("case", covering(CUTS_AND_MODELS, COVERED), ids=str)
def test_three_stages_of_two_chunks(case: tuple[Cut, str]) -> None:
    cases = {
        (cut, model): (*MODELS[model], *THREE_STAGES, *factors(cut))
        for cut, model in CUTS_AND_MODELS
        if ((cut, model) in COVERED) == (case in COVERED)
    }
    results = trained(6, tuple(cases.values()), STEPS)[cases[case]]
    check(results, [*THREE_STAGES, *factors(case[0])], MODELS[case[1]], STEPS)


WIRES = {(1, 1, 2): "fp32", (1, 2, 4): "bf16", (2, 2, 4): "bf16", (4, 4, 4): "bf16"}


@pytest.mark.parametrize(
    "cuts", covering([[*WIRES][::2], [*WIRES][1::2]], [[*WIRES][::2]]), ids=str
)
def test_bf16_stays_near_fp32(cuts: list[Cut]) -> None:
    """The bound of plain bf16: 1% on the loss of each step, also when bf16 travels."""
    cases = [
        (tiny_values(*factors(cut), f"collectives.grads_format={WIRES[cut]}"), "bf16", STEPS)
        for cut in cuts
    ]
    for rank in run_ranks(in_turn, 4, train_and_collect, cases):
        for cut, (losses, _, _) in zip(cuts, rank, strict=True):
            np.testing.assert_allclose(losses, reference((), STEPS)[0], 1e-2, err_msg=str(cut))


def losses_with(
    world: World, values: dict[str, Any], between: Callable[[Rig], None]
) -> list[float]:
    rig, losses = make_rig(world, values), []
    for step in range(STEPS):
        losses.append(rig.train(1, first=step)[0].loss)
        between(rig)
    return losses


def evaluate(rig: Rig) -> None:
    class Loader(EvaluationLoader):
        def micro_batches(self, step: int) -> list[Any]:
            return self.rig.batches(100 + step)

    assert np.isfinite(evaluation(rig, Loader(rig)).run().loss)


def draw_all(rig: Rig) -> None:
    for _, tensor in rig.states.parameters():
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    "cuts", covering([[(1, 2, 4), (4, 4, 4)], [(2, 2, 4)]], [[(2, 2, 4)]]), ids=str
)
def test_reading_between_steps(cuts: list[Cut]) -> None:
    """Evaluation and saving read fresh parameters, in another order than the step's."""
    cases = [(tiny_values(*factors(cut)), read) for cut in cuts for read in (evaluate, draw_all)]
    for rank in run_ranks(in_turn, 4, losses_with, cases):
        for losses in rank:
            np.testing.assert_allclose(losses, reference((), STEPS)[0], rtol=1e-5)


def freeze(world: World, values: dict[str, Any]) -> tuple[list[float], bool]:
    """Train with one matrix frozen; say whether it stayed as it was."""
    rig = make_rig(world, values, frozen=("layers.1.ffn.up.weight", "final_norm.bias"))
    before = {r.name: t.clone() for r, t in rig.states.parameters()}
    losses = [result.loss for result in rig.train(STEPS)]
    same = {r.name: torch.equal(before[r.name], t) for r, t in rig.states.parameters()}
    frozen = {name for name, kept in same.items() if kept}
    return losses, frozen == {"layers.1.ffn.up.weight", "final_norm.bias"}


@pytest.mark.exhaustive
def test_frozen_parameters_are_gathered_and_not_updated() -> None:
    expected, stayed = run_ranks(freeze, 1, tiny_values())[0]
    assert stayed
    cases = [(tiny_values(*factors(cut)),) for cut in [(1, 1, 1), (1, 2, 4), (4, 4, 4)]]
    for rank in run_ranks(in_turn, 4, freeze, cases):
        for losses, stayed in rank:
            assert stayed
            np.testing.assert_allclose(losses, expected, rtol=1e-5)


def leave_out(world: World, values: dict[str, Any]) -> list[float]:
    """Train with a layer that some micro-batches do not use at all, and others do."""
    rig = make_rig(world, values)
    layer = rig.model.chunks[0].decoder.layers[2]
    forward, calls = layer.mlp.forward, [0]

    def sometimes(hidden: torch.Tensor, **options: Any) -> Any:
        calls[0] += 1
        out, bias = forward(hidden, **options)
        unused = calls[0] % 2 == 0
        return (torch.zeros_like(out), None) if unused else (out, bias)

    layer.mlp.forward = sometimes
    return [result.loss for result in rig.train(STEPS)]


def test_parameter_without_gradient_in_some_micro_batches() -> None:
    expected = run_ranks(leave_out, 1, tiny_values("data.micro_batch=2"))[0]
    cuts = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)]
    cases = [(tiny_values("data.micro_batch=1", *factors(cut)),) for cut in cuts]
    for rank in run_ranks(in_turn, 2, leave_out, cases):
        for cut, losses in zip(cuts, rank, strict=True):
            np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=str(cut))


def broken(name: str) -> Callable[[World, dict[str, Any]], Any]:
    """Leave one thing out of the engine, in the ranks only."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def own_part(reduction: ReduceScatter) -> torch.Tensor:
        reduction._work.wait()
        return reduction._parts[reduction._position].float()

    damage: dict[str, Callable[[], None]] = {
        "reduction": lambda: setattr(ReduceScatter, "wait", own_part),
        "refresh": lambda: setattr(Parameters, "refresh", nothing),
        "sequence_norms": lambda: setattr(ShardedStates, "_add_partial", nothing),
        "fresh_start": lambda: setattr(Gradients, "begin_step", keep_sums),
    }

    def run(world: World, values: dict[str, Any]) -> Any:
        damage[name]()
        return train_and_collect(world, values, "fp32", STEPS)

    return run


def keep_sums(gradients: Gradients, micro_batches: int) -> None:
    for unit in gradients._units:
        kept = unit._has_sum
        unit.begin_step(micro_batches)
        unit._has_sum = kept


@pytest.mark.parametrize(
    ("name", "size", "overrides"),
    [
        ("reduction", 2, factors((2, 2, 2))),
        ("refresh", 2, factors((1, 1, 2))),
        pytest.param(
            "sequence_norms", 2, ["parallel.tensor=2", "parallel.sequence=true"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("fresh_start", 2, factors((1, 2, 2)), marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_what_is_left_out_is_noticed(name: str, size: int, overrides: list[str]) -> None:
    """Negative controls: without this, the comparisons above would prove nothing."""
    expected_losses, expected_norms, _ = reference((), STEPS)
    losses, norms, _ = run_ranks(broken(name), size, tiny_values(*overrides))[0]
    found = np.array([losses, norms])
    expected = np.array([expected_losses, expected_norms])
    assert not np.allclose(found, expected, rtol=1e-5, atol=0)


def fail_in_hook(world: World, values: dict[str, Any]) -> None:
    rig = make_rig(world, values)
    if world.rank == 1:
        parameter = rig.model.records[0].parameter
        parameter.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    rig.train(1)


def test_an_error_inside_a_hook_is_the_first_cause() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(fail_in_hook, 2, tiny_values(*factors((2, 2, 2))), timeout=20)
    first = str(failed.value).split("--- rank")[1]
    assert first.startswith(" 1")
    assert "ZeroDivisionError" in first
