"""The update is chosen on the device: its divisor, and whether it changes anything."""

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from frontier_llm.engine.update import UpdateChoice
from frontier_llm.errors import RankFailure, TrainingError
from frontier_llm.launch.world import World
from frontier_llm.sharding.adamw import AdamW
from frontier_llm.trainer import step_result
from frontier_llm.trainer.step_result import SCALARS, choose_by_sums
from tests.covering import exhaustive
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.values import tiny_values

SAMPLES, RANKS = 8, 3


def choose(scale: float = 1.0, clip_norm: float | None = 1.0, **sums: float) -> UpdateChoice:
    whole = {"samples": SAMPLES, "weight": SAMPLES, "ranks": RANKS}
    values = {**dict.fromkeys(SCALARS, 1.0), **whole, **sums}
    vector = torch.tensor([values[name] for name in SCALARS] + [7.0], dtype=torch.float64)
    return choose_by_sums(vector, scale, clip_norm, SAMPLES, RANKS)


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, None])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("norm", [0.0, 0.2, 0.99, 1.7, 123.4])
def test_the_divisor_is_that_of_the_host(
    norm: float, scale: float, clip_norm: float | None
) -> None:
    choice = choose(scale, clip_norm, squared_norm=(norm * scale) ** 2)
    measured = math.sqrt((norm * scale) ** 2) / scale
    excess = max(1.0, measured / clip_norm) if clip_norm else 1.0
    assert choice.divisor.dtype == choice.skip.dtype == torch.float32
    assert choice.divisor.item() == torch.tensor(scale * excess, dtype=torch.float32).item()
    assert choice.skip.item() == 0


@pytest.mark.parametrize("weight", [0.125, 3, 7.75])
def test_gradients_are_divided_by_the_weight_per_sample(weight: float) -> None:
    """The norm that is compared with the limit is that of the divided gradient."""
    choice = choose(4.0, 0.5, squared_norm=9.0, weight=weight)
    scale = 4 * weight / SAMPLES
    assert choice.divisor.item() == pytest.approx(scale * max(1, 3 / scale / 0.5))
    assert choose(weight=0).skip.item() == 1


@pytest.mark.parametrize("name", ["squared_norm", "loss_sum"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_are_not_finite_skip(name: str, value: float) -> None:
    assert choose(**{name: value}).skip.item() == 1


@pytest.mark.parametrize("samples", [SAMPLES - 1, SAMPLES + 1, 0])
def test_a_wrong_number_of_samples_skips(samples: float) -> None:
    assert choose(samples=samples).skip.item() == 1


def test_sums_that_lack_a_rank_skip() -> None:
    assert choose(ranks=RANKS - 1).skip.item() == 1


def state_bits(rig: Rig) -> list[torch.Tensor]:
    """Return the bits of masters, moments, step counters and parameters."""
    rig.states.settle()
    adamw = rig.states._optimizer
    assert isinstance(adamw, AdamW)
    counters = [torch.stack(group.step_counters) for group in adamw._groups]
    parameters = [unit.shard for unit in rig.states.all_units]
    states = (*adamw.masters, *adamw.exp_avgs, *adamw.exp_avg_sqs)
    tensors = [*states, *counters, *parameters]
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def count_changes(before: list[torch.Tensor], after: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def skip_one(world: World, values: dict[str, Any], precision: str) -> list[Any]:
    """Train two steps, skip one, train one; return what the last two steps changed."""
    rig = make_rig(world, values, precision)
    rig.train(2)
    before = state_bits(rig)
    with rig.spoiled():
        (skipped,) = rig.train(1, first=2)
    during_skip = count_changes(before, state_bits(rig))
    (next_step,) = rig.train(1, first=3)
    return [
        skipped.skipped,
        during_skip,
        next_step.skipped,
        math.isfinite(next_step.loss),
        count_changes(before, state_bits(rig)) > 0,
        # bytes count in the next step
        [result.sent["refresh_params"].node > 0 for result in (skipped, next_step)],
    ]


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        *exhaustive((["sharding=zero3"], "bf16"), (["sharding=zero1"], "fp32")),
        (["sharding=zero2", "collectives=zeropp"], "bf16"),
        (["parallel.tensor=2", "parallel.pipeline=2"], "fp32"),
    ],
)
def test_a_skipped_step_changes_no_bit(overrides: list[str], precision: str) -> None:
    values = tiny_values(*overrides, f"precision={precision}")
    ranks = run_ranks(skip_one, 4, values, precision, ranks_per_node=2)
    sends_parameters = "sharding=zero1" in overrides or "sharding=zero2" in overrides
    assert ranks == [[True, 0, False, True, True, [sends_parameters, False]]] * 4


def lose_a_batch(world: World, values: dict[str, Any]) -> int:
    rig = make_rig(world, values)
    rig.train(1)
    before = state_bits(rig)
    with pytest.raises(TrainingError):
        rig.step.run(2, rig.batches(1)[:-1], 1e-3)
    return count_changes(before, state_bits(rig))


def test_a_step_with_lost_samples_changes_no_bit() -> None:
    assert run_ranks(lose_a_batch, 2, tiny_values("sharding=zero1")) == [0, 0]


def abort_the_sums(world: World, values: dict[str, Any]) -> list[bool]:
    rig = make_rig(world, values)
    rig.train(1)
    before, sums = state_bits(rig), rig.step.sums
    aborted = SimpleNamespace(wait=lambda: None)
    with (
        mock.patch.object(step_result, "all_reduce", return_value=aborted),
        pytest.raises(RankFailure),
    ):
        rig.train(1, first=1)
    return [count_changes(before, state_bits(rig)) == 0, rig.step.sums is sums]


def test_sums_of_an_aborted_all_reduce_are_not_used() -> None:
    assert run_ranks(abort_the_sums, 2, tiny_values("sharding=zero1")) == [[True, True]] * 2


def observe_fence(world: World, values: dict[str, Any]) -> list[bool]:
    rig = make_rig(world, values)
    rig.train(1)
    seen: list[list[torch.Tensor]] = []

    def fence() -> None:
        seen.append(state_bits(rig))

    before, rig.step._update._before_update = state_bits(rig), fence
    rig.train(1, first=1)
    (at_fence,) = seen
    return [count_changes(before, at_fence) == 0, count_changes(before, state_bits(rig)) > 0]


def test_nothing_is_written_before_the_checkpoint_allows_it() -> None:
    """The fence of a lazy checkpoint copies the states that are not saved yet."""
    assert run_ranks(observe_fence, 2, tiny_values("sharding=zero2")) == [[True, True]] * 2
