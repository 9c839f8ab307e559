"""Who is late when nobody moves, and what is said about it."""

import time

from frontier_llm.parallel.collective_trace import LastCollective
from frontier_llm.parallel.stall import Phase, RankState, explain, explain_loss, late, page
from frontier_llm.parallel.world import World

WORLD = World(0, 4, 0, 2, "a", "slurm", "a", 1, "job", ("a", "b"))
ALARM = Phase("step", 7, time.monotonic(), 40.0)


def _state(rank, *, step=7, sequence=10, waits=True, group="data"):
    collective = LastCollective("all_reduce", group, sequence, waits)
    stack = (f'  File "loop.py", line {rank}, in here\n',)
    return RankState(rank, "ab"[rank // 2], "step", step, 41.0, collective, stack)


def _states(*states):
    return {state.rank: state for state in states}


def test_a_rank_without_a_word_is_the_late_one():
    states = _states(_state(0), _state(1), _state(3, step=6))
    assert late(states, 4) == [2]


def test_a_rank_that_is_busy_while_others_wait_is_the_late_one():
    states = _states(_state(0), _state(1, waits=False), _state(2), _state(3))
    assert late(states, 4) == [1]


def test_an_earlier_step_comes_before_an_earlier_collective():
    states = _states(_state(0), _state(1, step=6, sequence=12), _state(2, sequence=9), _state(3))
    assert late(states, 4) == [1]


def test_an_earlier_collective_of_the_same_group_is_late():
    states = _states(
        _state(0, group="tensor", sequence=3), _state(1, group="tensor", sequence=3),
        _state(2, sequence=8), _state(3, sequence=9),
    )  # fmt: skip
    assert late(states, 4) == [2]


def test_all_at_one_place_is_nobodys_fault():
    assert late(_states(*map(_state, range(4))), 4) == []
    text = explain(_states(*map(_state, range(4))), WORLD, ALARM, "stall.txt")
    assert "all ranks wait in one place" in text


def test_the_explanation_names_host_limit_and_what_the_others_do():
    states = _states(_state(0), _state(1), _state(2, waits=False))
    text = explain(states, WORLD, ALARM, "stall.txt")
    assert "step of step 7 took longer than 40.0 s" in text
    assert "late: rank 3 (b)" in text
    assert "rank 3: gave no word" in text
    assert "ranks 0, 1: step; waiting in all_reduce #10 of group data" in text
    busy = explain(_states(*map(_state, range(3)), _state(3, waits=False)), WORLD, ALARM, "f")
    assert 'File "loop.py", line 3' in busy


def test_the_page_has_every_ranks_stack():
    text = page(_states(*map(_state, range(3))), 4)
    assert all(f"line {rank}, in here" in text for rank in range(3))
    assert "rank 3: gave no word" in text


def test_a_state_survives_the_store():
    state = RankState.now(WORLD, ALARM)
    assert RankState.from_json(state.to_json()) == state
    assert any("test_stall.py" in line for line in state.stack)


def test_a_loss_names_all_who_do_not_answer():
    text = explain_loss(_states(_state(0), _state(1)), WORLD, "Connection closed", "stall.txt")
    assert text.startswith("rank 2 (b), rank 3 (b) are gone without a word: killed")
    assert "rank 0 (a) was told: Connection closed" in text
    assert text.endswith("where every rank stood, with its stack: stall.txt")


def test_a_loss_of_which_all_answer_is_the_networks():
    answers = _states(*map(_state, range(4)))
    text = explain_loss(answers, WORLD, "Connection reset by peer", "stall.txt")
    assert text.startswith("ranks lost contact with one another, yet all of them answer")
