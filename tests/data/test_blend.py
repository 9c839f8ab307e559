import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.cli.experiments import composed
from frontier_llm.config.reading import BLOCK, check_sources, corpus_shares
from frontier_llm.data.blend import Schedule
from frontier_llm.errors import ConfigError
from tests.properties import examples

KEY = 77
WEIGHTS = {"en": 0.6, "de": 0.3, "sw": 0.1}


def deal(schedule: Schedule, samples: range) -> list[tuple[int, int]]:
    return [schedule.locate(index) for index in samples]


def _shares(weights: tuple[float, ...]) -> dict[str, float]:
    shares = [weight / sum(weights) for weight in weights]
    return dict(zip(WEIGHTS, shares, strict=True))


def check_read_in_order(dealt: list[tuple[int, int]], corpora: int) -> None:
    """Check that each corpus gives its samples 0, 1, 2, ... without gaps."""
    for corpus in range(corpora):
        own = [index for found, index in dealt if found == corpus]
        assert own == list(range(len(own)))


def test_each_corpus_is_read_in_its_own_order_and_in_its_share():
    schedule = Schedule.starting(WEIGHTS, KEY)
    dealt = deal(schedule, range(3 * BLOCK))
    check_read_in_order(dealt, 3)
    for start in (0, 100, BLOCK - 50, BLOCK + 5):
        counts = Counter(corpus for corpus, _ in dealt[start : start + 1000])
        for corpus, share in enumerate(WEIGHTS.values()):
            assert counts[corpus] == pytest.approx(1000 * share, abs=5)


def test_any_sample_is_located_directly():
    far = 10**15 + 12345
    corpus, index = Schedule.starting(WEIGHTS, KEY).locate(far)
    assert index == pytest.approx(far * list(WEIGHTS.values())[corpus], rel=1e-3)
    assert Schedule.starting(WEIGHTS, KEY).locate(far) == (corpus, index)
    others = [Schedule.starting(WEIGHTS, KEY + 1).locate(i) for i in range(50)]
    assert others != deal(Schedule.starting(WEIGHTS, KEY), range(50))


@examples(12)
@given(
    st.lists(
        st.tuples(
            st.integers(1, BLOCK + 500), st.lists(st.floats(0.01, 1), min_size=3, max_size=3)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_changed_weights_neither_skip_nor_repeat_samples(changes):
    schedule, at = Schedule.starting(WEIGHTS, KEY), 0
    for length, weights in changes:
        at += length
        before = deal(schedule, range(max(0, at - 50), at))
        schedule = schedule.changed(at, _shares(weights))
        assert deal(schedule, range(max(0, at - 50), at)) == before
        schedule = schedule.with_history(json.loads(json.dumps(schedule.to_meta())))
    check_read_in_order(deal(schedule, range(at + 2000)), 3)


def test_equal_weights_add_no_segment_and_a_rewind_drops_later_segments():
    schedule = Schedule.starting(WEIGHTS, KEY)
    assert schedule.changed(500, WEIGHTS).segments == schedule.segments
    flat = dict.fromkeys(WEIGHTS, 1 / 3)
    changed = schedule.changed(500, flat)
    assert [segment.first_sample for segment in changed.segments] == [0, 500]
    assert changed.changed(400, WEIGHTS).segments == schedule.segments
    with pytest.raises(ConfigError, match=r"data\.corpora"):
        schedule.changed(10, {"en": 1.0})


@given(
    st.integers(1, BLOCK + 500),
    st.integers(1, BLOCK + 500),
    st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
)
@examples(12)
def test_corpora_can_be_added(first: int, second: int, weights: list[float]):
    """One by one, in any order of names; each is read from its beginning and without gaps."""
    a, b, c, d, e = weights
    starts = [
        (0, {"en": a, "de": b}),
        (first, {"sw": c, "en": a, "de": b}),
        (first + second, {"yo": d, "de": b, "sw": e, "en": a}),
    ]
    schedule = Schedule.starting(starts[0][1], KEY)
    for at, new in starts[1:]:
        before = [name_and_index(schedule, index) for index in range(max(0, at - 50), at)]
        schedule = schedule.changed(at, new)
        assert [name_and_index(schedule, i) for i in range(max(0, at - 50), at)] == before
        schedule = schedule.with_history(json.loads(json.dumps(schedule.to_meta())))
    dealt = deal(schedule, range(first + second + 2000))
    check_read_in_order(dealt, 4)
    assert schedule.names == ("en", "de", "sw", "yo")
    assert all(corpus < 2 for corpus, _ in dealt[:first])
    assert {corpus for corpus, _ in dealt[first + second :]} == {0, 1, 2, 3}
    rewound = schedule.changed(first, {"en": a, "de": b})
    assert rewound.segments == Schedule.starting(starts[0][1], KEY).segments


def name_and_index(schedule: Schedule, index: int) -> tuple[str, int]:
    corpus, in_corpus = schedule.locate(index)
    return schedule.names[corpus], in_corpus


def test_weights_follow_sizes_by_temperature():
    tokens = {"en": 10**9, "sw": 10**6}
    none = dict.fromkeys(tokens)
    assert corpus_shares(tokens, none, 1.0)["sw"] == pytest.approx(1e6 / (1e9 + 1e6))
    assert corpus_shares(tokens, none, 0.0) == {"en": 0.5, "sw": 0.5}
    lifted = corpus_shares(tokens, none, 0.3)
    assert lifted["sw"] == pytest.approx(1e6**0.3 / (1e6**0.3 + 1e9**0.3))
    assert corpus_shares(tokens, {"en": 3.0, "sw": 1.0}, 0.3) == {"en": 0.75, "sw": 0.25}


@pytest.mark.parametrize(
    ("weight", "problem"),
    [(None, "no weight for sw"), (1e-7, "sw with 1e-07 of all samples"), (-1.0, "than 0")],
)
def test_wrong_weights_are_refused_before_a_corpus_is_read(weight: float | None, problem: str):
    weights = (
        f"[{{name: en, path: A, weight: 1}}, {{name: sw, path: B, weight: {weight or 'null'}}}]"
    )
    with pytest.raises(ConfigError, match=problem):
        check_sources(composed("data=blend", f"data.corpora={weights}").data)


def test_a_share_by_size_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match=r"sw with 1e-07 of all samples"):
        corpus_shares({"en": 10**7, "sw": 1}, {"en": None, "sw": None}, 1.0)


def test_a_small_share_is_still_read():
    schedule = Schedule.starting({"en": 1 - 1.5 / BLOCK, "sw": 1.5 / BLOCK}, KEY)
    dealt = deal(schedule, range(2 * BLOCK))
    assert Counter(corpus for corpus, _ in dealt)[1] in (2, 4)
    check_read_in_order(dealt, 2)
