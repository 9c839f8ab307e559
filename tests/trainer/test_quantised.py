"""Training with quantised collectives: near plain training, equal replicas, nothing stale."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.errors import TrainingError
from frontier_llm.launch.world import World
from frontier_llm.protocols import product_sink, set_product_sink
from frontier_llm.sharding.gradients import Gradients
from frontier_llm.sharding.unit_gradients import UnitGradients
from tests.covering import covering
from tests.ranks import RanksFailedError, in_turn, run_ranks
from tests.streams.mutations import Mutation, mutated
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import reference
from tests.trainer.test_sharding_parity import factors
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

ZEROPP = ("collectives=zeropp", "collectives.block_elements=64")
STILL = ("optimizer.learning_rate=1e-9", "optimizer.minimum_learning_rate=0.0")


def weights(rig: Rig) -> dict[str, torch.Tensor]:
    """What the modules compute with, whole."""
    found = {}
    for record in rig.model.records:
        units = rig.states.units([record.unit])
        rig.states.acquire(units)
        found[record.name] = record.parameter.detach().clone()
        rig.states.release(units)
    return found


def exact(rig: Rig) -> dict[str, torch.Tensor]:
    return {record.name: whole.clone() for record, whole in rig.states.parameters()}


def train(world: World, values: dict[str, Any], precision: str, steps: int) -> dict[str, Any]:
    rig = make_rig(world, values, precision)
    results = rig.train(steps)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": weights(rig),
        "exact": exact(rig),
        "sent": [(result.sent, result.unquantised) for result in results],
        "memory": rig.states.memory_bytes(),
    }


LAYOUTS = {
    "three_ranks": (3, "fp32", ["data.global_batch=12", "model.hidden=36", *factors((3, 3, 3))]),
    "pipeline": (4, "bf16", ["parallel.pipeline=2", *factors((2, 2, 2))]),
    "interleaved_tensor": (
        8,
        "fp32",
        [
            "parallel.pipeline=2", "parallel.chunks=2", "parallel.tensor=2",
            "parallel.sequence=true", *factors((1, 2, 2)),
        ],
    ),
    "zero2": (4, "bf16", factors((1, 4, 4))),
    "zeropp": (4, "fp32", factors((2, 4, 4))),
    "sums_int8": (
        4,
        "fp32",
        ["collectives.sums_format=int8", "collectives.error_feedback=true", *factors((1, 1, 1))],
    ),
    "sums_bf16": (4, "bf16", ["collectives.sums_format=bf16", *factors((2, 2, 2))]),
    "zero3_recompute": (4, "bf16", ["recompute=full", *factors((4, 4, 4))]),
    "t5": (4, "fp32", [*TINY_T5, "parallel.pipeline=2", *factors((2, 2, 2))]),
}  # fmt: skip
STEPS = 3
COVERED = ("three_ranks", "pipeline", "zero2", "zeropp", "sums_int8")


@functools.cache
def trained(size: int, are_covered: bool) -> dict[str, list[Any]]:
    """Train the layouts of this size that always run, or the others, on one set of ranks."""
    names = [n for n in LAYOUTS if LAYOUTS[n][0] == size and (n in COVERED) == are_covered]
    cases = [(tiny_values(*ZEROPP, *LAYOUTS[n][2]), LAYOUTS[n][1], STEPS) for n in names]
    by_rank = run_ranks(in_turn, size, train, cases, ranks_per_node=2, timeout=120)
    return dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("layout", covering(LAYOUTS, COVERED))
def test_losses_stay_near_plain_ones_and_replicas_are_equal(layout: str) -> None:
    """int8 and int4 blocks move a loss by less than bf16's bound, 1%."""
    size, _, overrides = LAYOUTS[layout]
    alone = [
        o
        for o in overrides
        if not o.startswith(("parallel.", "sharding.", "recompute", "collectives"))
    ]
    expected = reference(tuple(alone), STEPS)[0]
    ranks = trained(size, layout in COVERED)[layout]
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], expected, rtol=1e-2)
    if "parallel." in " ".join(overrides):
        return
    for name, tensor in ranks[0]["weights"].items():
        for other in ranks[1:]:
            assert torch.equal(other["weights"][name], tensor), name
            assert torch.equal(other["exact"][name], ranks[0]["exact"][name]), name


@pytest.mark.parametrize("cut", covering([(1, 1, 2), (2, 2, 2)], [(1, 1, 2)]), ids=str)
def test_rounding_never_reaches_the_master_weights(cut: tuple[int, int, int]) -> None:
    """fp32: what training reads is rounded, what `parameters` gives and is saved is not."""
    untouched = run_ranks(train, 1, tiny_values(*STILL), "fp32", 3)[0]
    for rank in run_ranks(train, 2, tiny_values(*factors(cut), *ZEROPP, *STILL), "fp32", 3):
        worst = 0.0
        for name, tensor in rank["exact"].items():
            torch.testing.assert_close(tensor, untouched["exact"][name], rtol=0, atol=2e-8)
            worst = max(worst, (rank["weights"][name] - tensor).abs().max().item())
        assert worst > 1e-4


def test_norms_and_biases_travel_in_bf16() -> None:
    for rank in run_ranks(train, 2, tiny_values(*factors((2, 2, 2)), *ZEROPP), "fp32", 2):
        for name, tensor in rank["weights"].items():
            if tensor.dim() == 1:
                assert torch.equal(tensor, rank["exact"][name].bfloat16().float()), name


def test_formats_end_at_a_step() -> None:
    """From until_step on, everything is sent as it is, and parameters are exact again."""
    values = tiny_values(*factors((1, 1, 2)), *ZEROPP, "collectives.until_step=3")
    plain = run_ranks(train, 2, tiny_values(*factors((1, 1, 2))), "fp32", 6)[0]["sent"]
    for rank in run_ranks(train, 2, values, "fp32", 6):
        for name, tensor in rank["weights"].items():
            assert torch.equal(tensor, rank["exact"][name]), name
        for step, (sent, unquantised) in enumerate(rank["sent"], start=1):
            # the refresh of step 3 is counted with step 4
            assert bool(unquantised) == (step <= 4)
            if step > 4:
                assert sent == plain[step - 1][0]
            if 1 < step <= 3:
                wide = plain[step - 1][0]["refresh_params"].node
                assert sent["refresh_params"].node < 0.4 * wide


@pytest.mark.exhaustive
def test_kernels_make_no_difference() -> None:
    values = [tiny_values(*factors((2, 2, 2)), *ZEROPP, f"kernels={k}") for k in ("torch", "auto")]
    torchs, natives = (run_ranks(train, 2, one, "bf16", 3)[0]["losses"] for one in values)
    assert torchs == natives


@pytest.mark.exhaustive
def test_rounding_at_random_is_the_same_for_a_seed() -> None:
    def losses(seed: int) -> list[float]:
        values = tiny_values(
            *factors((2, 2, 2)), *ZEROPP, "collectives.rounding=stochastic", f"trainer.seed={seed}"
        )
        found: list[float] = run_ranks(train, 2, values, "fp32", 2)[0]["losses"]
        return found

    assert losses(1) == losses(1)


def overflow(world: World, values: dict[str, Any]) -> list[Any]:
    """Make one gradient huge, and infinite in a row, on one rank in the second step."""
    rig = make_rig(world, values)
    results = rig.train(1)
    parameter = next(r.parameter for r in rig.model.records if "qkv.weight" in r.name)

    sink = product_sink(parameter)
    assert sink is not None

    def spoil(grad_outputs: torch.Tensor, inputs: torch.Tensor, gather: None) -> None:
        huge = grad_outputs * 1e15
        huge[0, 0] = float("inf")
        sink(huge if world.rank == 1 else grad_outputs, inputs)

    set_product_sink(parameter, spoil)
    before = exact(rig)
    results += rig.train(1, first=1)
    same = all(torch.equal(tensor, before[name]) for name, tensor in exact(rig).items())
    set_product_sink(parameter, sink)
    results += rig.train(2, first=2)
    growth = results[2].grad_norm / results[0].grad_norm
    return [[result.skipped for result in results], same, results[-1].loss, growth]


@pytest.mark.parametrize("preset", covering(["zeropp", "zeropp_feedback"], ["zeropp"]))
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(preset: str) -> None:
    values = tiny_values(*factors((2, 2, 2)), f"collectives={preset}")
    for skipped, same, loss, growth in run_ranks(overflow, 2, values, ranks_per_node=1):
        assert skipped == [False, True, False, False]
        assert same
        assert np.isfinite(loss)
        assert growth < 2, "what rounding lost of the bad gradient came back"


def edit(world: World, values: dict[str, Any]) -> list[str]:
    """Write to masters between steps, with and without saying so."""
    rig = make_rig(world, values)
    rig.train(2)
    rig.states.settle()
    for shard in rig.states.shards():
        shard.master.mul_(1.5)
    refused = ""
    try:
        rig.train(1, first=2)
    except TrainingError as error:
        refused = str(error)
    rig.states.adopt(updates=2, step=2)
    now, after = exact(rig), weights(rig)
    worst = max((after[n] - tensor).abs().max().item() for n, tensor in now.items())
    return [refused, f"{worst:.6f}"]


@pytest.mark.parametrize(
    ("cut", "formats"), [((1, 1, 1), ()), ((1, 1, 2), ()), ((2, 2, 2), ()), ((1, 2, 2), ZEROPP)]
)
def test_an_edit_of_the_masters_cannot_be_overlooked(
    cut: tuple[int, int, int], formats: tuple[str, ...]
) -> None:
    for refused, worst in run_ranks(edit, 2, tiny_values(*factors(cut), *formats)):
        assert "were written to" in refused
        assert "adopt" in refused
        assert float(worst) <= (0.02 if formats else 0.0)


def go_on(
    world: World, values: dict[str, Any], saved: int | None = 3, updates: int = 3
) -> list[list[float]]:
    """Train on after three steps, of which some are skipped; then go back to them, twice."""
    rig = make_rig(world, values)
    rig.train(updates, saved=saved)
    if updates < 3:
        with rig.spoiled():
            rig.train(3 - updates, first=updates, saved=saved)
    rig.states.settle()
    kept = [
        tuple(state.clone() for state in shard.states.values()) for shard in rig.states.shards()
    ]
    losses = [[result.loss for result in rig.train(2, first=3)]]
    for _ in range(2):
        rig.states.settle()
        for shard, states in zip(rig.states.shards(), kept, strict=True):
            for mine, saved in zip(shard.states.values(), states, strict=True):
                mine.copy_(saved)
        rig.states.adopt(updates, step=3)
        losses.append([result.loss for result in rig.train(2, first=3)])
    return losses


@pytest.mark.parametrize(
    "cuts",
    covering([[(1, 1, 1), (2, 2, 2)], [(1, 1, 2), (1, 2, 2)]], [[(1, 1, 2), (1, 2, 2)]]),
    ids=str,
)
def test_a_loaded_state_goes_on_to_the_bit(cuts: list[tuple[int, int, int]]) -> None:
    formats = (*ZEROPP, "collectives.sums_format=int4")
    cases = [(tiny_values(*factors(cut), *formats),) for cut in cuts]
    for rank in run_ranks(in_turn, 2, go_on, cases, ranks_per_node=1):
        for cut, (straight, again, once_more) in zip(cuts, rank, strict=True):
            assert straight == again == once_more, cut


RESET = {
    "sums": (2, (1, 1, 1)),
    "states": (2, (1, 1, 2)),
    "gradients": (2, (1, 2, 2)),
    "parameters": (2, (2, 2, 2)),
    "gradients and states": (4, (1, 2, 4)),
    "parameters and sums": (4, (2, 2, 2)),
}
"""By the digits whose groups have rounding errors: ranks, and factors."""


def go_back(
    case: str, mutation: Mutation | None = None
) -> tuple[list[float], list[float], list[float]]:
    """Return the losses after three steps, of the first rank: straight on, and after going back."""
    ranks, cut = RESET[case]
    feedback = ("collectives=zeropp_feedback", "collectives.sums_format=int4")
    arguments = (mutation, go_on, tiny_values(*factors(cut), *feedback), None)
    straight, again, once_more = run_ranks(mutated, ranks, *arguments, ranks_per_node=1)[0]
    return straight, again, once_more


@pytest.mark.parametrize(
    "case", covering(RESET, [case for case in RESET if case != "gradients and states"])
)
def test_going_back_brings_no_rounding_errors_along(case: str) -> None:
    straight, again, once_more = go_back(case)
    assert again == once_more
    assert again != straight, "nothing was kept: this test sees nothing"


@pytest.mark.parametrize(
    "case", covering(["gradients and states", "parameters and sums"], ["parameters and sums"])
)
@pytest.mark.parametrize("group", covering([0, 1], [1]))
def test_a_reset_of_only_one_group_is_noticed(case: str, group: int) -> None:
    one = f"[*gradients.residuals.values()][{group}:{group + 1}]:"
    mutation = (Gradients.reset_feedback, "gradients.residuals.values():", one)
    _, again, once_more = go_back(case, mutation)
    assert again != once_more


def test_rounding_errors_of_another_group_do_not_fit() -> None:
    other = "[*self.residuals.values()][[*self.residuals].index(hop) - 1]"
    with pytest.raises(RanksFailedError, match="assert_fits"):
        go_back("gradients and states", (UnitGradients._hops, "self.residuals.get(hop)", other))
