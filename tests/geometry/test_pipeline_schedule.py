"""Pipeline schedules: complete, free of deadlocks, and within their bounds of memory and time."""

import os
from collections import Counter, defaultdict
from itertools import groupby, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.pipeline_schedule import (
    Action,
    Placement,
    Schedule,
    forward_actions,
    held,
    make_schedule,
    run_stages,
)
from frontier_llm.geometry.stage_messages import Launch, programs
from frontier_llm.planner.timeline import ActionSeconds, simulate
from tests.properties import examples

CHUNKS = {"1f1b": [1], "zb_h1": [1], "interleaved": [2, 3, 8], "zb_v": [2], "v_half": [2]}
SMALL = [*product([2, 3, 4, 5], [1, 2, 3, 5, 7, 8, 13], [0, 1, 3], [False, True])]
LARGE = [(16, 40, 0, False), (17, 200, 2, True), (64, 70, 0, True), (63, 130, 4, False)]
"""Stages, micro-batches, `waiting_weights` and whether activations are recomputed."""
SECONDS = {"forward": 1, "backward": 2, "input_gradients": 1, "weight_gradients": 1}


def cases(name):
    """Yield the arguments of `make_schedule` and the schedule."""
    for stages, micro_batches, waiting, recomputes in [*SMALL, *LARGE]:
        for chunks in CHUNKS[name][: 1 if stages > 5 else None]:
            sizes = (stages, chunks, micro_batches, waiting, recomputes)
            yield sizes, make_schedule(name, *sizes)


def run(schedule):
    """Run all stages; a stage waits for the input of its next action. Return the actions run."""
    placement, last = schedule.placement, schedule.placement.chunks - 1
    done, position, has_progressed = set(), [0] * placement.stages, True
    while has_progressed:
        has_progressed = False
        for stage, actions in enumerate(schedule.actions):
            while position[stage] < len(actions):
                kind, virtual_stage, micro_batch = actions[position[stage]]
                chunk = placement.chunk(stage, virtual_stage)
                if kind == "forward":
                    needed = ("forward", chunk - 1) if chunk else None
                elif kind == "weight_gradients":
                    needed = ("input_gradients", chunk)
                else:
                    needed = ("input_gradients", chunk + 1) if chunk < last else ("forward", chunk)
                if needed and (*needed, micro_batch) not in done:
                    break
                name = "input_gradients" if kind == "backward" else kind
                done.add((name, chunk, micro_batch))
                position[stage] += 1
                has_progressed = True
    return sum(position)


def messages(schedule, *, of_senders):
    """Return the messages between each two stages, in the order in which they are sent or read."""
    placement, found = schedule.placement, defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        for kind, virtual_stage, micro_batch in actions:
            if kind == "weight_gradients":
                continue
            forward, chunk = kind == "forward", placement.chunk(stage, virtual_stage)
            neighbour = chunk + (1 if forward == of_senders else -1)
            if 0 <= neighbour < placement.chunks and placement.stage(neighbour) != stage:
                pair = (stage, placement.stage(neighbour))
                receiver = neighbour if of_senders else chunk
                found[pair if of_senders else pair[::-1]].append((forward, receiver, micro_batch))
    return found


@pytest.mark.parametrize("name", CHUNKS)
def test_every_pass_is_made_once_in_its_order(name):
    for (_, chunks, micro_batches, _, _), schedule in cases(name):
        for actions in schedule.actions:
            kinds = defaultdict(list)
            for kind, *passed in actions:
                kinds[tuple(passed)].append(kind)
            assert set(kinds) == set(product(range(chunks), range(micro_batches)))
            split = ["forward", "input_gradients", "weight_gradients"]
            assert all(order in (["forward", "backward"], split) for order in kinds.values())


@pytest.mark.parametrize("name", CHUNKS)
def test_no_stage_waits_for_ever(name):
    for _, schedule in cases(name):
        assert run(schedule) == sum(map(len, schedule.actions))


@pytest.mark.parametrize("name", CHUNKS)
def test_a_stage_reads_messages_in_the_order_in_which_they_are_sent(name):
    """At most one waits for an earlier one: of two interleaved stages each is before the other."""
    for (stages, *_), schedule in cases(name):
        read = messages(schedule, of_senders=False)
        for pair, sent in messages(schedule, of_senders=True).items():
            assert Counter(sent) == Counter(read[pair])
            places = {message: place for place, message in enumerate(sent)}
            early = max(places[message] - place for place, message in enumerate(read[pair]))
            assert early <= (name == "interleaved" and stages == 2)


@examples(1000 if os.environ.get("ALL_SCHEDULES") else 10)
@given(st.data())
def test_messages_match_in_any_schedule(data):
    """Both stages launch every message, in the same order, and no stage reads before it did."""
    name = data.draw(st.sampled_from(list(CHUNKS)))
    chunks = data.draw(st.integers(2, 8)) if name == "interleaved" else CHUNKS[name][0]
    stages, waiting = data.draw(st.integers(2, 64)), data.draw(st.integers(0, 9))
    micro_batches = data.draw(st.integers(1, 200))
    schedule = make_schedule(name, stages, chunks, micro_batches, waiting, data.draw(st.booleans()))
    assert run(schedule) == sum(map(len, schedule.actions))
    sent, read = (messages(schedule, of_senders=senders) for senders in (True, False))
    launched = [defaultdict(list), defaultdict(list)]  # receives and sends
    for stage, program in enumerate(programs(schedule.placement, schedule.actions)):
        assert [item for item in program if not isinstance(item, Launch)] == [
            *schedule.actions[stage]
        ]
        for one in program:
            if isinstance(one, Launch):
                pair = (stage, one.stage) if one.is_send else (one.stage, stage)
                launched[one.is_send][pair].append(one.message)
    assert launched == [sent, sent]
    assert {pair: sorted(some) for pair, some in read.items()} == {
        pair: sorted(some) for pair, some in sent.items()
    }


@pytest.mark.parametrize("name", CHUNKS)
def test_stages_hold_no_more_than_the_fullest_of_the_passes_in_order(name):
    """As many passes as the first stage of 1F1B, also in V placement; half in V-Half."""
    for (stages, chunks, micro_batches, waiting, _), schedule in cases(name):
        ones, none = [1] * chunks, [0] * chunks
        all_passes = chunks * min(stages, micro_batches)
        for stage in range(stages):
            passes = held(schedule, stage, ones, ones)
            weights = held(schedule, stage, none, ones)
            if waiting:
                assert weights <= waiting
            if name == "1f1b" and not waiting:
                assert passes == min(stages - stage, micro_batches)
            elif name == "interleaved":
                plain = make_schedule(name, stages, chunks, micro_batches, 0, False)
                assert passes <= held(plain, 0, ones, ones)
            else:
                assert passes <= all_passes
            if name == "v_half":
                assert passes <= stages + 2  # of 2 * stages


@pytest.mark.parametrize("name", CHUNKS)
def test_a_backward_pass_is_split_where_another_stage_waits(name):
    for (*_, waiting, _), schedule in cases(name):
        is_split = waiting > 0 or name not in ("1f1b", "interleaved")
        placement = schedule.placement
        for stage, actions in enumerate(schedule.actions):
            for action, following in pairwise(actions):
                chunk = placement.chunk(stage, action.virtual_stage)
                is_local = chunk == 0 or placement.stage(chunk - 1) == stage
                if action.kind == "backward" and is_split:
                    assert is_local
                if action.kind == "input_gradients" and is_local:
                    assert following != action._replace(kind="weight_gradients")
            kinds = {action.kind for action in actions}
            assert is_split or kinds == {"forward", "backward"}


def seconds(name, stages, chunks, micro_batches, waiting=0):
    """Simulate a step in which each of the three parts of a micro-batch takes 1 s per stage."""
    schedule = make_schedule(name, stages, chunks, micro_batches, waiting, False)
    one = ActionSeconds(*(SECONDS[kind] / chunks for kind in ActionSeconds._fields))
    events = simulate(schedule, [[one] * chunks] * stages)
    return max(event.end for event in events)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 5), (4, 9), (5, 20), (16, 40)])
def test_bubbles_are_those_of_the_papers(stages, micro_batches):
    """For each stage but one: a micro-batch in 1F1B, a third of it in ZB-H1, a sixth in ZB-V."""
    compute, others = 3 * micro_batches, stages - 1
    bubbles = {
        ("1f1b", 1): 3 * others,
        ("interleaved", 2): 3 * others / 2,
        ("interleaved", 3): 3 * others / 3,
        ("zb_h1", 1): others,
        ("zb_v", 2): others / 2,
    }
    for (name, chunks), bubble in bubbles.items():
        assert seconds(name, stages, chunks, micro_batches) == pytest.approx(compute + bubble), name


@given(st.integers(2, 9), st.integers(1, 30), st.integers(1, 10))
def test_splitting_never_takes_longer_and_waiting_neither(stages, micro_batches, waiting):
    plain = seconds("1f1b", stages, 1, micro_batches)
    zb_h1 = seconds("zb_h1", stages, 1, micro_batches)
    zb_v = seconds("zb_v", stages, 2, micro_batches)
    assert zb_v <= zb_h1 + 1e-9
    assert zb_h1 <= seconds("1f1b", stages, 1, micro_batches, waiting) + 1e-9 <= plain + 2e-9
    assert seconds("v_half", stages, 2, micro_batches) <= plain + 1e-9
    interleaved = seconds("interleaved", stages, 2, micro_batches)
    assert seconds("interleaved", stages, 2, micro_batches, waiting) <= interleaved + 1e-9


@given(st.integers(2, 20), st.integers(1, 4), st.integers(1, 100), st.booleans())
def test_forward_passes_alone_run_for_any_number_of_micro_batches(stages, chunks, count, folded):
    placement = Placement(stages, chunks, folded)
    actions = [forward_actions(placement, stage, count) for stage in range(stages)]
    expected = {Action("forward", *passed) for passed in product(range(chunks), range(count))}
    for order in actions:
        assert len(order) == len(expected)
        assert set(order) == expected
    schedule = Schedule(placement, tuple(map(tuple, actions)))
    assert run(schedule) == stages * len(expected)


@given(st.integers(2, 20), st.integers(1, 300))
def test_groups_are_even_and_as_small_as_the_stages_allow(stages, count):
    order = forward_actions(Placement(stages, 2), 0, count)
    runs = [len(list(run)) for _, run in groupby(order, key=lambda action: action.virtual_stage)]
    groups = runs[::2]
    assert sum(groups) == count
    assert len(groups) == max(1, count // stages)
    assert max(groups) - min(groups) <= 1


def test_held_counts_what_each_kind_of_action_keeps_and_frees():
    """Forward, forward, backward, input gradients, weight gradients of chunks of unlike sizes."""
    order = [
        Action("forward", 0, 0), Action("forward", 1, 0), Action("backward", 1, 0),
        Action("input_gradients", 0, 0), Action("weight_gradients", 0, 0),
    ]  # fmt: skip
    schedule = Schedule(Placement(1, 2), (tuple(order),))
    assert held(schedule, 0, [10, 4], [3, 100]) == 14
    assert held(schedule, 0, [1, 4], [30, 100]) == 30


def test_stages_that_wait_for_each_other_are_an_error():
    def stage(actions):
        yield from actions

    with pytest.raises(RuntimeError, match="wait for each other"):
        run_stages([stage([1, 1, 1, 1]), stage([2, 3, 3, 3]), stage([])])
    run_stages([stage([0, 1]), stage([0, 1, 2])])


def test_all_ranks_make_the_same_schedule():
    sizes = ("zb_v", 4, 2, 9, 3, True)
    first = make_schedule(*sizes)
    make_schedule.cache_clear()
    again = make_schedule(*sizes)
    assert again is not first
    assert again == first
