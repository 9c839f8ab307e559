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

from frontier_llm.geometry.pipeline_actions import Action
from frontier_llm.launch.world import World
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.pipeline import Pipeline
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import MODELS, assemble, first_gradients, reference
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
def test_schedules_equal_one_process(
    stages: int, sharding: str, model: list[str] | None
) -> None:
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
