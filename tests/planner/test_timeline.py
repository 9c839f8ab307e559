"""Simulated steps follow the lists of actions, and agree with the closed form."""

from itertools import pairwise

import pytest

from frontier_llm.cli.experiments import composed
from frontier_llm.geometry.pipeline_schedule import make_schedule
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.layout_time import SPLIT_SHARE, LayoutTime
from frontier_llm.planner.step_time import step_time
from frontier_llm.planner.timeline import (
    NO_SEND,
    ActionSeconds,
    Send,
    action_times,
    pass_seconds,
    shortened,
    simulate,
)
from tests.planner.layouts import make

EVEN = ActionSeconds(1.0, 2.0, 1.0, 1.0)
"""Seconds of the actions of a chunk, in the units of the papers."""
SCHEDULES = [
    ("1f1b", 1, 0), ("1f1b", 1, 2), ("zb_h1", 1, 0), ("interleaved", 2, 0), ("interleaved", 2, 1),
    ("interleaved", 3, 4), ("zb_v", 2, 0), ("zb_v", 2, 3), ("v_half", 2, 0),
]  # fmt: skip


def _step(schedule, seconds, send=NO_SEND):
    return max(event.end for event in simulate(schedule, seconds, send))


def _sized(chunks, stages, scale=1.0):
    seconds = ActionSeconds(*(scale * value / chunks for value in EVEN))
    return [[seconds] * chunks] * stages


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(("chunks", "micro_batches"), [(1, 3), (1, 16), (2, 16), (4, 8)])
def test_even_stages_take_what_the_closed_form_says(stages, chunks, micro_batches):
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = make_schedule(name, stages, chunks, micro_batches, 0, False)
    end = _step(schedule, _sized(chunks, stages))
    assert end == pytest.approx(3.0 * (micro_batches + (stages - 1) / chunks))


@pytest.mark.parametrize("slow", [0, 2, 3])
def test_uneven_stages_take_hardly_less_than_the_closed_form_says(slow):
    seconds = _sized(1, 4)
    seconds = [_sized(1, 1, 1.5)[0] if stage == slow else of for stage, of in enumerate(seconds)]
    end = _step(make_schedule("1f1b", 4, 1, 24, 0, False), seconds)
    closed_form = 24 * 4.5 + 3 * 3.0
    # a bound: a slow first stage fills its wait with forward passes of its own
    assert 0.95 * closed_form < end <= closed_form + 1e-9


def test_zero_bubble_schedules_have_the_bubbles_of_their_papers():
    stages, micro_batches = 4, 16
    busy = 3.0 * micro_batches
    zb_h1 = _step(make_schedule("zb_h1", stages, 1, micro_batches, 0, False), _sized(1, stages))
    assert zb_h1 == pytest.approx(busy + (stages - 1) * (1 + 1 - 1))  # arXiv:2401.10241, table 2
    zb_v = _step(make_schedule("zb_v", stages, 2, micro_batches, 0, False), _sized(2, stages))
    plain = _step(make_schedule("1f1b", stages, 1, micro_batches, 0, False), _sized(1, stages))
    assert busy <= zb_v < zb_h1 < plain


@pytest.mark.parametrize(("name", "chunks", "waiting"), SCHEDULES)
def test_actions_follow_their_list_and_the_results_that_they_need(name, chunks, waiting):
    stages, send = 4, Send(0.125, 0.25)
    schedule = make_schedule(name, stages, chunks, 8, waiting, False)
    events = simulate(schedule, _sized(chunks, stages), send)
    placement, ends = schedule.placement, {}
    for stage in range(stages):
        mine = [event for event in events if event.stage == stage]
        assert tuple(event.action for event in mine) == schedule.actions[stage]
        assert all(a.end <= b.start for a, b in pairwise(mine))
        for event in mine:
            kind, virtual_stage, micro_batch = event.action
            if kind != "weight_gradients":
                chunk = placement.chunk(stage, virtual_stage)
                ends[kind == "forward", chunk, micro_batch] = event.end
    for event in events:
        kind, virtual_stage, micro_batch = event.action
        chunk = placement.chunk(event.stage, virtual_stage)
        source = placement.source(chunk, is_forward=kind == "forward")
        if source is not None:
            is_local = placement.stage(source[1]) == event.stage
            arrival = ends[(*source, micro_batch)] + (0.0 if is_local else send.hidden)
            assert event.start >= arrival - 1e-9


def test_only_results_for_another_stage_are_sent():
    """In V placement nothing is sent where the chunks turn back, and nothing after the head."""
    schedule = make_schedule("zb_v", 2, 2, 4, 0, False)
    events = simulate(schedule, _sized(2, 2), Send(occupied=1.0))
    longer = {
        (event.stage, event.action.virtual_stage)
        for event in events
        if event.action.kind == "forward" and event.end - event.start > 1
    }
    # chunk 0 (stage 0) sends to chunk 1 (stage 1), chunk 2 (stage 1) to chunk 3 (stage 0)
    assert longer == {(0, 0), (1, 1)}


@pytest.mark.parametrize(("name", "chunks", "waiting"), SCHEDULES)
def test_a_long_step_is_extended_by_its_steady_state(name, chunks, waiting):
    layout = make(
        "parallel.pipeline=4", f"parallel.chunks={chunks}", f"parallel.schedule={name}",
        f"parallel.waiting_weights={waiting}", "data.global_batch=94", "data.micro_batch=1",
        "model.layers=12", ranks=8,
    ).layout  # fmt: skip
    # the last stage is slower, as it is with a large head
    seconds = [*_sized(chunks, 3), *_sized(chunks, 1, 1.2)]
    send = Send(0.02, 0.03)
    full = max(times[-1][1] for times in action_times(layout.schedule, seconds, send))
    assert shortened(layout).micro_batches < layout.micro_batches == 47
    assert pass_seconds(layout, seconds, send) == pytest.approx(full, rel=0.005)


LARGE = [
    ("frontier_175b", 1024, ()),
    ("frontier_175b", 1024, ("parallel.pipeline=16", "parallel.chunks=6")),
    ("frontier_175b", 1024, ("parallel.chunks=1", "parallel.schedule=1f1b")),
    ("frontier_1t", 3072, ()),
    ("megatron_145_6b", 1536, ()),
]


@pytest.mark.parametrize(("experiment", "ranks", "overrides"), LARGE)
def test_the_closed_form_agrees_with_the_simulation(experiment, ranks, overrides):
    candidate = Candidate.of(composed(f"experiment={experiment}", *overrides), ranks, 8)
    layout, time = LayoutTime(candidate), step_time(candidate)
    closed_form = layout.pipeline_seconds(
        [_of_kind(kind, layout, time) for kind in range(len(time.actions))], ()
    )
    simulated = pass_seconds(candidate.layout, candidate.stages.of_stages(time.actions), time.send)
    assert closed_form == pytest.approx(simulated, rel=0.015)


def _of_kind(kind, layout, time):
    """Return the seconds of a micro-batch on a kind of stage, sends included."""
    seconds = sum(actions.total(splits=False) for actions in time.actions[kind])
    return seconds + layout.passes[kind].exchange.seconds


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.schedule=zb_h1"],
        ["parallel.schedule=1f1b", "parallel.waiting_weights=2"],
        ["parallel.chunks=2", "parallel.schedule=zb_v", "parallel.sequence=true"],
        ["parallel.chunks=6", "parallel.schedule=interleaved", "parallel.waiting_weights=1"],
    ],
)
def test_a_step_of_split_passes_is_that_of_its_simulation(overrides, sharding):
    """The bubble is simulated without model states, and grows with the seconds of a stage."""
    base = ["parallel.pipeline=16", "parallel.chunks=1", "parallel.waiting_weights=0"]
    config = composed("experiment=frontier_175b", *base, *overrides, f"sharding={sharding}")
    candidate = Candidate.of(config, 1024, 8)
    time = step_time(candidate)
    parts = time.parts
    passes = time.seconds - sum(
        parts[name] for name in ("reduce_states", "refresh_params", "update", "checkpoint")
    )
    actions = candidate.stages.of_stages(time.actions)
    simulated = pass_seconds(candidate.layout, actions, time.send)
    # traffic in every micro-batch changes the bubble
    tolerance = {"zero1": 0.005, "zero2": 0.035, "zero3": 0.05}[sharding]
    assert passes == pytest.approx(simulated, rel=tolerance)
    assert LayoutTime(candidate).bound_seconds <= time.seconds


def test_splitting_costs_time_and_exposes_the_reduction_of_input_gradients():
    base = ["parallel.pipeline=16", "parallel.chunks=1", "parallel.schedule=1f1b"]

    def chunk(*overrides):
        config = composed("experiment=frontier_175b", *base, *overrides)
        return LayoutTime(Candidate.of(config, 1024, 8)).passes[1].chunks[0]

    for tensor in (1, 4):
        passes = chunk(f"parallel.tensor={tensor}", "parallel.sequence=false")
        actions, compute = passes.actions, passes.compute
        split = actions.input_gradients + actions.weight_gradients - actions.backward
        overhead = SPLIT_SHARE * (compute.input_gradients + compute.weight_gradients)
        assert overhead > 0
        assert split == pytest.approx(overhead) if tensor == 1 else split > 1.2 * overhead
    # gathering the inputs again falls on the weight gradients
    sharded = chunk("parallel.tensor=4", "parallel.sequence=true")
    assert passes.tensor.weight_gradients == 0 < sharded.tensor.weight_gradients


def test_weight_gradients_are_a_third_of_the_products():
    config = composed("experiment=frontier_175b", "recompute=none")
    compute = LayoutTime(Candidate.of(config, 1024, 8)).passes[0].chunks[1].compute
    assert compute.recomputed == 0
    assert compute.weight_gradients < compute.forward < compute.input_gradients
    assert compute.weight_gradients > 0.8 * compute.forward  # attention and norms have no weights


def test_gathers_of_parameters_lengthen_the_bubble_of_split_passes():
    base = ["parallel.pipeline=16", "parallel.chunks=1", "parallel.schedule=zb_h1"]
    bubbles = [
        step_time(
            Candidate.of(composed("experiment=frontier_175b", *base, f"sharding={name}"), 1024, 8)
        ).parts["bubble"]
        for name in ("zero1", "zero3")
    ]
    assert bubbles[1] > 1.05 * bubbles[0]
