"""Every pipeline schedule is the same computation as one process.

A test runs several cases on one set of ranks. With ALL_SCHEDULES=1 in the environment, it runs
every schedule with every number of stages, sharding, model and recomputation, for ten steps. By
default each schedule runs once with each sharding in the exhaustive set, and with one sharding on
two stages always. The rest of these 40 cases is chosen such that any two values of two different
columns meet at least once (`test_any_two_values_meet`).
"""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.launch.world import World
from frontier_llm.parallel.stage_exchange import StageExchange
from frontier_llm.trainer.pipeline import Pipeline, _Passes
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig, mean_losses
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
STEPS = 10 if ALL else 2
MICRO_BATCHES = 5
"""On each replica; neither two nor four stages divide them."""
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
GPT = ["model.layers=8", *MODELS["untied_gqa_swiglu"]]
TIED = ["model.layers=8", *MODELS["tied_gelu"]]
MODEL_OF = {
    "tied": MODELS["tied_gelu"],
    "untied": MODELS["untied_gqa_swiglu"],
    "t5": [*TINY_T5, "model.init_std=0.3"],
}
RECOMPUTED = ("none", "full")


@dataclass(frozen=True)
class Case:
    schedule: str
    sharding: str
    stages: int
    model: str
    recompute: str
    pipeline: int | None = None
    """Stages of the pipeline for which the model was chosen, if there are more than `stages`."""

    @property
    def largest_pipeline(self) -> int:
        return self.pipeline or self.stages

    @property
    def batch(self) -> str:
        replicas = 1 if self.sharding.startswith("tensor") else 2
        return f"data.global_batch={MICRO_BATCHES * replicas}"

    @property
    def whole(self) -> tuple[str, ...]:
        """The model and the batch: a layer per model chunk if each stage has two chunks."""
        layers = [f"model.layers={2 * self.largest_pipeline}"]
        if self.model == "t5":
            layers.append(f"model.encoder_layers={self.largest_pipeline - 1}")
        return (*MODEL_OF[self.model], *layers, self.batch)

    @property
    def values(self) -> dict[str, Any]:
        return tiny_values(
            *self.whole, f"parallel.pipeline={self.stages}",
            *SHARDED[self.sharding], *schedule_keys(self.schedule), f"recompute={self.recompute}",
        )  # fmt: skip


def chosen_cases() -> list[Case]:
    """Return the cases of the default run, one for each pair of schedule and sharding."""
    found = []
    for i, schedule in enumerate(SCHEDULES):
        for j, sharding in enumerate(SHARDED):
            stages, recompute = (2, 4)[(i + j) % 2], RECOMPUTED[(i // 2 + j) % 2]
            found.append(Case(schedule, sharding, stages, tuple(MODEL_OF)[(i + j) % 3], recompute))
    return found


CASES = (
    [Case(*values) for values in product(SCHEDULES, SHARDED, (2, 4), MODEL_OF, RECOMPUTED)]
    if ALL else chosen_cases()
)  # fmt: skip


def test_any_two_values_meet() -> None:
    columns = [set(column) for column in zip(*map(astuple, CASES), strict=True)]
    for one, other in combinations(range(len(columns)), 2):
        met = {(astuple(case)[one], astuple(case)[other]) for case in CASES}
        assert met == set(product(columns[one], columns[other]))
    assert list(map(len, columns)) == [len(SCHEDULES), len(SHARDED), 2, len(MODEL_OF), 2, 1]


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


def train_each(world: World, cases: list[dict[str, Any]]) -> list[Found]:
    """Train every case on this rank; they have the same sharding and number of stages."""
    found: list[Found] = []
    rig: Rig | None = None
    for values in cases:
        rig = make_rig(world, values, groups_of=rig)
        first = rig.train(1)
        gradients = first_gradients(rig)
        results = first + rig.train(STEPS - 1, first=1)
        found.append(([r.loss for r in results], [r.grad_norm for r in results], gradients))
    return found


def check(
    ranks: Sequence[Found], expected: Sequence[Found], name: str, tolerance: float = 1e-5
) -> None:
    """Compare what each rank found in a case with what the ranks of another case found."""
    for losses, norms, _ in ranks:
        np.testing.assert_allclose(losses, expected[0][0], rtol=tolerance, err_msg=name)
        np.testing.assert_allclose(norms, expected[0][1], rtol=tolerance, err_msg=name)
    gradients, whole = (assemble([rank[2] for rank in of]) for of in (ranks, expected))
    assert gradients.keys() == whole.keys()
    for tensor, gradient in whole.items():
        error = np.linalg.norm(gradients[tensor] - gradient) / np.linalg.norm(gradient)
        assert error <= tolerance, f"{name}: {tensor}: relative gradient error {error:.1e}"


def rounds_like(case: Case) -> Case:
    """Return a case whose quantised messages have the same contents, so that they round equally.

    An untied GPT sends the same messages without a pipeline. Tied tables and relative positions
    have a copy on each stage that needs them, so the placement of the model chunks decides how
    often their gradients are rounded. The V placement has both ends of a tied table on one stage,
    where v_half adds their gradients in another order than zb_v: it is compared with itself.
    """
    if case.model == "untied":
        return replace(case, schedule="1f1b", stages=1, pipeline=case.stages)
    like = "zb_v"
    if SCHEDULES[case.schedule][0] == 1:
        like = "1f1b"
    elif case.schedule.startswith("interleaved"):
        like = "interleaved"
    elif (case.schedule, case.model) == ("v_half", "tied"):
        like = "v_half"
    return replace(case, schedule=like, recompute="none")


def run_cases(cases: Sequence[Case]) -> dict[Case, Sequence[Found]]:
    """Return what each rank finds in each case; one set of ranks per number of stages."""
    found: dict[Case, Sequence[Found]] = {}
    for stages in sorted({case.stages for case in cases}):
        own = [case for case in cases if case.stages == stages]
        values = [case.values for case in own]  # composed once, before the ranks are forked
        results = run_ranks(train_each, 2 * stages, values, timeout=60 + 20 * len(own))
        found |= zip(own, zip(*results, strict=True), strict=True)
    return found


@pytest.mark.parametrize(
    "sharding",
    covering(
        [name for name in SHARDED if name != "zeropp"], ["replicated", "zero1", "tensor2_sequence"]
    ),
)
@pytest.mark.parametrize("stages", covering([2, 4], [4]))
def test_schedules_equal_one_process(stages: int, sharding: str) -> None:
    """The sharding that always runs has each schedule once."""
    cases = [case for case in CASES if (case.stages, case.sharding) == (stages, sharding)]
    for case, ranks in run_cases(cases).items():
        check(ranks, [reference(case.whole, STEPS)], str(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [2, 4])
def test_schedules_round_quantised_messages_equally(stages: int) -> None:
    """One process rounds nothing, so it is only near; what rounds the same contents is equal."""
    cases = [case for case in CASES if (case.stages, case.sharding) == (stages, "zeropp")]
    found = run_cases(list(dict.fromkeys([*cases, *map(rounds_like, cases)])))
    for case in cases:
        ranks, others = found[case], found[rounds_like(case)]
        exact = reference(case.whole, STEPS)
        np.testing.assert_allclose(ranks[0][0], exact[0], rtol=1e-2, err_msg=str(case))
        check(ranks, others, str(case))


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


@pytest.mark.exhaustive
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
    launch = StageExchange.launch

    def launch_and_count(exchange: StageExchange, *arguments: Any) -> None:
        launch(exchange, *arguments)
        most[0] = max(most[0], sum(map(len, exchange._sent.values())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageExchange, "launch", launch_and_count)
        for name, values in cases.items():
            rig, most[0] = make_rig(world, values, groups_of=rig), 0
            rig.train(1)
            found[name] = most[0]
    return found


def test_a_sent_tensor_is_kept_only_until_it_has_arrived() -> None:
    """Not until the end of the step: each stage sends 12 tensors or more."""
    overrides = [*TIED, "model.layers=4", "data.global_batch=12", "parallel.pipeline=2"]
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
        losses = [loss.item() for loss in mean_losses(pipeline, batches)]
        logits = pipeline.logits(batches[0], 2)
    return losses + ([] if logits is None else [logits.double().sum().item()])


@pytest.mark.parametrize("precision", covering(["fp32", "bf16", "fp16"], ["bf16", "fp16"]))
def test_schedules_are_equal_to_the_bit_with_dropout(precision: str) -> None:
    """Masks depend on micro-batch and layer alone, and gradients are added in the same order.

    By default every other schedule recomputes its layers, and half of them are run in bf16, the
    other half in fp16.
    """
    overrides = [
        *GPT, "data.global_batch=5", "parallel.pipeline=4", "model.dropout=0.2",
        "model.attention_dropout=0.2", f"precision={precision}",
    ]  # fmt: skip
    fp16 = precision == "fp16"
    cases = {
        f"{name} recompute={recompute}": tiny_values(
            *overrides, *schedule_keys(name), f"recompute={recompute}"
        )
        for index, (name, recompute) in enumerate(product(SCHEDULES, RECOMPUTED))
        if ALL or (index % 4 in (0, 3) and (precision == "fp32" or index // 4 % 2 == fp16))
    }
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


@pytest.mark.exhaustive
def test_dropout_is_equal_on_one_and_on_four_stages() -> None:
    dropout = ["model.dropout=0.2", "model.attention_dropout=0.2", "data.global_batch=5"]
    keys = [*TIED, *dropout, "parallel.pipeline=4", *schedule_keys("zb_v")]
    (losses, *_), *_ = run_ranks(train_and_collect, 4, tiny_values(*keys), "fp32", 2)
    np.testing.assert_allclose(losses, reference((*TIED, *dropout), 2)[0], rtol=1e-5)
    assert not np.allclose(losses, reference((*TIED, *dropout[2:]), 2)[0], rtol=1e-4)
