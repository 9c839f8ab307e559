"""The measured times of a pipeline's actions: complete, in order, and only of one step."""

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from frontier_llm.geometry.pipeline_schedule import Action, Placement
from frontier_llm.launch.world import World
from frontier_llm.trainer.step_measurements import MEASURED_STEPS, PassTimes
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_schedules import schedule_keys
from tests.values import tiny_values

PAUSE = 0.03
"""Seconds that every forward pass takes in addition; they make the order of passes visible."""
Times = dict[Action, tuple[float, float]]
"""Start and end of each action, on the clock that all processes of a host share."""


def measure(world: World, values: dict[str, Any]) -> tuple[Placement, list[bool], Times]:
    """Train all steps that are measured and one more; return which of them has set the times."""
    rig = make_rig(world, values)
    for chunk in rig.model.chunks:
        chunk.register_forward_pre_hook(lambda *_: time.sleep(PAUSE))
    times, changes = rig.step.timer.passes, []
    for step in range(MEASURED_STEPS + 1):
        before = times.seconds
        rig.train(1, first=step)
        changes.append(times.seconds != before)
    layout = rig.model.layout
    actions = layout.schedule.actions[rig.groups.coordinates.pipeline]
    shared = [(times._zero + start, times._zero + end) for start, end in times.seconds]
    return layout.placement, changes, dict(zip(actions, shared, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", covering(["1f1b", "interleaved_waiting", "zb_v"], ["1f1b", "interleaved_waiting"])
)
def test_every_action_has_its_time_once_and_starts_after_its_input(schedule: str) -> None:
    keys = ["parallel.pipeline=2", "data.global_batch=4", *schedule_keys(schedule)]
    results = run_ranks(measure, 2, tiny_values(*keys))
    forwards, gradients = {}, {}
    for stage, (placement, changes, times) in enumerate(results):
        assert changes == [False] * (MEASURED_STEPS - 1) + [True, False]
        assert all(before[1] <= after[0] for before, after in pairwise(times.values()))
        for (kind, virtual_stage, micro_batch), (start, end) in times.items():
            key = placement.chunk(stage, virtual_stage), micro_batch
            assert start + (PAUSE if kind == "forward" else 0) <= end
            if kind == "forward":
                forwards[key] = start
            elif kind != "weight_gradients":
                gradients[key] = start
    assert len(forwards) == len(gradients) == 4 * results[0][0].chunks
    for (chunk, micro_batch), start in forwards.items():
        following = forwards.get((chunk + 1, micro_batch), gradients[chunk, micro_batch])
        assert start + PAUSE <= following
    for (chunk, micro_batch), start in gradients.items():
        assert chunk == 0 or start < gradients[chunk - 1, micro_batch]


def test_no_time_is_recorded_outside_a_measured_step() -> None:
    times = PassTimes(2)
    times.start()
    times.end()
    times.finish()
    assert times.seconds == []


def without_pipeline(world: World, values: dict[str, Any]) -> int:
    rig = make_rig(world, values)
    rig.train(MEASURED_STEPS)
    return len(rig.step.timer.passes.seconds)


def test_nothing_is_measured_without_a_pipeline() -> None:
    assert run_ranks(without_pipeline, 1, tiny_values()) == [0]


def on_device(world: World) -> tuple[list[tuple[float, float]], float]:
    """Time two products on the device; return also the seconds that the host has measured."""
    matrix = torch.ones(4096, 4096, device=torch.device("cuda"))
    times, began = PassTimes(2), time.perf_counter()
    times.measure(matrix.device)
    for _ in range(2):
        times.start()
        torch.matmul(matrix, matrix)
        times.end()
    times.finish()
    return times.seconds, time.perf_counter() - began


@pytest.mark.gpu
def test_times_of_a_device_are_within_those_of_the_host() -> None:
    ((((start, end), (next_start, next_end)), seconds),) = run_ranks(on_device, 1)
    assert 0 <= start < end <= next_start < next_end < seconds
