"""Every pipeline schedule is the same computation as one process.

Each test runs all schedules of one layout on one set of ranks. By default a schedule recomputes
either nothing or full layers; with ALL_SCHEDULES=1 in the environment, it does each in turn.
"""

import os
import random
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.parallel.stage_exchange import StageExchange
from frontier_llm.trainer.pipeline import Pipeline, _Passes
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import (
    MODELS,
    assemble,
    first_gradients,
    reference,
    train_and_collect,
)
from tests.trainer.test_sharding_parity import factors
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

ALL = bool(os.environ.get("ALL_SCHEDULES"))
STEPS = 10 if ALL else 3
BATCH = "data.global_batch=10"
"""Five micro-batches on each of two replicas, which neither two nor four stages divide."""
SCHEDULES = {
    "1f1b": (1, 0),
    "1f1b_waiting": (1, 2),
    "interleaved": (2, 0),
    "interleaved_waiting": (2, 3),
    "zb_h1": (1, 0),
    "zb_v": (2, 0),
    "zb_v_limited": (2, 1),
    "v_half": (2, 0),
}
"""Model chunks per stage, and the limit of waiting weight gradients, 0 = the schedule's own."""
SHARDED = {
    "tensor2_sequence": ["parallel.tensor=2", "parallel.sequence=true"],
    "replicated": factors((1, 1, 1)),
    "zero1": factors((1, 1, 2)),
    "zero3": factors((2, 2, 2)),
    "zeropp": ["sharding=zeropp", "collectives=zeropp"],
}
"""What two ranks of a stage divide between them."""
T5 = [*TINY_T5, "model.layers=8", "model.encoder_layers=3", "model.init_std=0.3"]
GPT = ["model.layers=8", *MODELS["untied_gqa_swiglu"]]
TIED = ["model.layers=8", *MODELS["tied_gelu"]]


def schedule_keys(name: str) -> list[str]:
    chunks, waiting = SCHEDULES[name]
    schedule = name.removesuffix("_waiting").removesuffix("_limited")
    return [
        f"parallel.schedule={schedule}",
        f"parallel.chunks={chunks}",
        f"parallel.waiting_weights={waiting}",
    ]


Found = tuple[list[float], list[float], Any]
"""Losses, norms and first gradients of a run."""


def train_each(world: World, cases: dict[str, dict[str, Any]]) -> dict[str, Found]:
    """Train every case on this rank; they differ in schedule and recomputation alone."""
    found: dict[str, Found] = {}
    rig: Rig | None = None
    for name, values in cases.items():
        rig = make_rig(world, values, groups_of=rig)
        first = rig.train(1)
        gradients = first_gradients(rig)
        results = first + rig.train(STEPS - 1, first=1)
        found[name] = [r.loss for r in results], [r.grad_norm for r in results], gradients
    return found


def cases_of(overrides: list[str]) -> dict[str, dict[str, Any]]:
    recomputed = ("none", "full")
    pairs = list(product(SCHEDULES, recomputed)) if ALL else [
        (name, recomputed[index % 2]) for index, name in enumerate(SCHEDULES)
    ]  # fmt: skip
    return {
        f"{name} recompute={recompute}": tiny_values(
            *overrides, *schedule_keys(name), f"recompute={recompute}"
        )
        for name, recompute in pairs
    }


def check(results: list[dict[str, Found]], expected: Found, tolerance: float = 1e-5) -> None:
    losses_alone, norms_alone, gradients_alone = expected
    whole = assemble([gradients_alone])
    for name in results[0]:
        for rank in results:
            losses, norms, _ = rank[name]
            np.testing.assert_allclose(losses, losses_alone, rtol=tolerance, err_msg=name)
            np.testing.assert_allclose(norms, norms_alone, rtol=tolerance, err_msg=name)
        gradients = assemble([rank[name][2] for rank in results])
        assert gradients.keys() == whole.keys()
        for tensor, gradient in whole.items():
            error = np.linalg.norm(gradients[tensor] - gradient) / np.linalg.norm(gradient)
            assert error <= tolerance, f"{name}: {tensor}: relative gradient error {error:.1e}"


@pytest.mark.parametrize("model", [TIED, GPT, T5] if ALL else [None], ids=str)
@pytest.mark.parametrize("sharding", SHARDED)
@pytest.mark.parametrize("stages", [2, 4])
def test_schedules_equal_one_process(stages: int, sharding: str, model: list[str] | None) -> None:
    if model is None:  # each model with each kind of sharding at least once
        index = list(SHARDED).index(sharding) + stages // 2
        model = (TIED, GPT, T5)[index % 3]
    overrides = [*model, BATCH, f"parallel.pipeline={stages}", *SHARDED[sharding]]
    results = run_ranks(train_each, 2 * stages, cases_of(overrides), timeout=600)
    if sharding == "zeropp":  # quantised messages round, equally under every schedule
        first = next(iter(results[0]))
        expected = results[0][first]
        for name in results[0]:
            np.testing.assert_allclose(results[0][name][0], expected[0], rtol=1e-2, err_msg=name)
        return
    check(results, reference((*model, BATCH), STEPS))


def train_delayed(world: World, cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Train one step of every case, with random pauses before the passes of each rank."""
    draws = random.Random(world.rank)
    train, found, rig = Pipeline.train, {}, None

    def train_slowly(pipeline: Pipeline, *arguments: Any) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("forward", "backward"):
                patch.setattr(_Passes, name, delayed(getattr(_Passes, name), draws))
            return train(pipeline, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "train", train_slowly)
        for name, values in cases.items():
            rig = make_rig(world, values, groups_of=rig)
            (result,) = rig.train(1)
            found[name] = [result.loss, result.grad_norm]
    return found


def delayed(function: Any, draws: random.Random) -> Any:
    def pause_and_call(*arguments: Any) -> Any:
        time.sleep(draws.choice([0, 0, 0.001, 0.03]))
        return function(*arguments)

    return pause_and_call


def test_no_schedule_depends_on_the_speed_of_stages() -> None:
    overrides = [*TIED, "data.global_batch=7", "parallel.pipeline=4"]
    cases = {name: tiny_values(*overrides, *schedule_keys(name)) for name in SCHEDULES}
    results = run_ranks(train_delayed, 4, cases, timeout=120)
    losses, norms, _ = reference((*TIED, "data.global_batch=7"), STEPS)
    for rank in results:
        for name, found in rank.items():
            np.testing.assert_allclose(found, [losses[0], norms[0]], rtol=1e-5, err_msg=name)


def count_sent(world: World, cases: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return how many sent tensors a rank keeps at most in a step of each case."""
    most, found, rig = [0], {}, None
    send = StageExchange.send

    def send_and_count(exchange: StageExchange, *arguments: Any) -> None:
        send(exchange, *arguments)
        most[0] = max(most[0], sum(map(len, exchange._sent.values())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageExchange, "send", send_and_count)
        for name, values in cases.items():
            rig, most[0] = make_rig(world, values, groups_of=rig), 0
            rig.train(1)
            found[name] = most[0]
    return found


def test_a_sent_tensor_is_kept_only_until_it_has_arrived() -> None:
    """Not until the end of the step: each stage sends 30 tensors or more."""
    overrides = [*TIED, "data.global_batch=30", "parallel.pipeline=2"]
    cases = {name: tiny_values(*overrides, *schedule_keys(name)) for name in SCHEDULES}
    for rank in run_ranks(count_sent, 2, cases, timeout=120):
        assert max(rank.values()) <= 4, rank


def train_in(world: World, cases: dict[str, dict[str, Any]], precision: str) -> dict[str, Any]:
    """Train two steps of every case; return losses, norms and the loss of an evaluation."""
    found, rig = {}, None
    for name, values in cases.items():
        rig = make_rig(world, values, precision, groups_of=rig)
        results = rig.train(2)
        found[name] = [(r.loss, r.grad_norm) for r in results], evaluate(rig)
    return found


def evaluate(rig: Rig) -> list[float]:
    """Return the losses of three micro-batches, fewer than there are stages, and of one sample."""
    for chunk in rig.model.chunks:
        chunk.eval()
    pipeline = Pipeline(rig.model, rig.groups)
    with torch.no_grad():
        batches = rig.batches(7)[:3]
        losses = [loss.item() for loss in pipeline.losses(batches)]
        logits = pipeline.logits(batches[0], 2)
    return losses + ([] if logits is None else [logits.double().sum().item()])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_schedules_are_equal_to_the_bit_with_dropout(precision: str) -> None:
    """Masks depend on micro-batch and layer alone, and gradients are added in the same order."""
    overrides = [
        *GPT, "data.global_batch=5", "parallel.pipeline=4", "model.dropout=0.2",
        "model.attention_dropout=0.2", f"precision={precision}",
    ]  # fmt: skip
    cases = cases_of(overrides)
    results = run_ranks(train_in, 4, cases, precision, timeout=120)
    by_name = {name: [rank[name] for rank in results] for name in cases}
    steps = {name: ranks[0][0] for name, ranks in by_name.items()}
    first = next(iter(steps.values()))
    assert first[0] != first[1]
    for name, found in steps.items():
        assert found == first, name
    evaluations = [[rank[1] for rank in ranks if rank[1]] for ranks in by_name.values()]
    assert all(len(losses) == 1 and len(losses[0]) == 4 for losses in evaluations)
    for (losses,) in evaluations:
        np.testing.assert_allclose(losses, evaluations[0][0], rtol=1e-6)


def test_dropout_is_equal_on_one_and_on_four_stages() -> None:
    dropout = ["model.dropout=0.2", "model.attention_dropout=0.2", "data.global_batch=5"]
    keys = [*TIED, *dropout, "parallel.pipeline=4", *schedule_keys("zb_v")]
    (losses, *_), *_ = run_ranks(train_and_collect, 4, tiny_values(*keys), "fp32", 2)
    np.testing.assert_allclose(losses, reference((*TIED, *dropout), 2)[0], rtol=1e-5)
    assert not np.allclose(losses, reference((*TIED, *dropout[2:]), 2)[0], rtol=1e-4)
