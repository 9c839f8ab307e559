"""Which ranks are late when a run hangs, and the message about it."""

import time

from frontier_llm.health.diagnosis import (
    LastCollective,
    Phase,
    RankState,
    explain_loss,
    explain_lost_store,
    explain_stall,
    format_states,
    late_ranks,
)
from frontier_llm.launch.world import World

WORLD = World(0, 4, 0, 2, "a", "slurm", "a", 1, "job", ("a", "b"))
ALARM = Phase("step", 7, time.monotonic(), 40.0)


def _state(rank, *, step=7, sequence=10, is_waiting=True, group="data"):
    collective = LastCollective("all_reduce", group, sequence, is_waiting)
    stack = (f'  File "loop.py", line {rank}, in here\n',)
    return RankState(rank, "ab"[rank // 2], "step", step, 41.0, collective, stack)


def _states(*states):
    return {state.rank: state for state in states}


def test_a_rank_that_does_not_report_is_late():
    states = _states(_state(0), _state(1), _state(3, step=6))
    assert late_ranks(states, 4) == [2]


def test_a_rank_that_is_busy_while_others_wait_is_late():
    states = _states(_state(0), _state(1, is_waiting=False), _state(2), _state(3))
    assert late_ranks(states, 4) == [1]


def test_an_earlier_step_comes_before_an_earlier_collective():
    states = _states(_state(0), _state(1, step=6, sequence=12), _state(2, sequence=9), _state(3))
    assert late_ranks(states, 4) == [1]


def test_an_earlier_collective_of_the_same_group_is_late_ranks():
    states = _states(
        _state(0, group="tensor", sequence=3), _state(1, group="tensor", sequence=3),
        _state(2, sequence=8), _state(3, sequence=9),
    )  # fmt: skip
    assert late_ranks(states, 4) == [2]


def test_no_rank_is_late_if_all_wait_in_the_same_place():
    assert late_ranks(_states(*map(_state, range(4))), 4) == []
    text = explain_stall(_states(*map(_state, range(4))), WORLD, ALARM, "stall.txt")
    assert "all ranks wait in the same place" in text


def test_the_message_names_host_limit_and_activity_of_the_others():
    states = _states(_state(0), _state(1), _state(2, is_waiting=False))
    text = explain_stall(states, WORLD, ALARM, "stall.txt")
    assert "step of step 7 took longer than 40.0 s" in text
    assert "late: rank 3 (b)" in text
    assert "rank 3: did not report" in text
    assert "ranks 0, 1: step; waiting in all_reduce #10 of group data" in text
    busy = explain_stall(
        _states(*map(_state, range(3)), _state(3, is_waiting=False)), WORLD, ALARM, "f"
    )
    assert 'File "loop.py", line 3' in busy


def test_the_file_has_the_stack_of_every_rank():
    text = format_states(_states(*map(_state, range(3))), 4)
    assert all(f"line {rank}, in here" in text for rank in range(3))
    assert "rank 3: did not report" in text


def test_a_state_survives_the_store():
    state = RankState.now(WORLD, ALARM)
    assert RankState.from_json(state.to_json()) == state
    assert any("test_diagnosis.py" in line for line in state.stack)


def test_a_loss_names_all_ranks_that_do_not_report():
    text = explain_loss(_states(_state(0), _state(1)), WORLD, "Connection closed", "stall.txt")
    assert text.startswith("rank 2 (b), rank 3 (b) are gone without an error message: killed")
    assert "rank 0 (a) noticed it: Connection closed" in text
    assert text.endswith("state and stack of every rank: stall.txt")


def test_a_loss_after_which_all_ranks_report_is_a_network_problem():
    answers = _states(*map(_state, range(4)))
    text = explain_loss(answers, WORLD, "Connection reset by peer", "stall.txt")
    assert text.startswith("ranks lost contact with each other, but all of them still run")


def test_without_a_store_a_rank_names_its_own_event_and_rank_zero():
    began = Phase("step", 7, time.monotonic() - 45, 40.0)
    text = explain_lost_store(WORLD, began, None)
    assert text.startswith(
        "stall: rank 0 (a) has been in step of step 7 for 45 s (limit: 40 s), and the store of "
        "rank 0 (a) at a does not answer"
    )
    text = explain_lost_store(WORLD, began, "Connection closed")
    assert "lost contact with another rank in step of step 7 (Connection closed)" in text
    assert "limit" not in text
