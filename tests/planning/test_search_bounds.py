"""The bounds of a search exclude what is too large or beaten, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.planning.bounds import ParetoFront, least_bytes, peak_bytes
from frontier_llm.planner.memory import fullest_of, kinds_activations
from frontier_llm.planner.space import legal_factors
from tests.planner.layouts import make

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)))


@given(POINTS, st.integers(0, 10), st.integers(0, 10))
def test_the_front_beats_what_has_at_least_the_room(points, peak, seconds):
    front = ParetoFront[None]()
    for point in points:
        front.add(*point, None)
    assert front.beats(peak, seconds) == (peak >= front.room(seconds))
    assert front.beats(peak, seconds) == any(p <= peak and s <= seconds for p, s in points)


def test_memory_is_exact_below_the_limit():
    base = make("parallel.pipeline=4", "model.layers=8", "sharding=zero1", ranks=16)
    activations = kinds_activations(base)
    for factors in legal_factors(base.config, base.grid, base.factors):
        candidate = base.with_factors(factors)
        exact = fullest_of(candidate, activations).total
        assert peak_bytes(candidate, activations, exact + 1) == exact
        assert least_bytes(base, factors, activations) <= exact
        for limit in (exact, exact * 0.99, exact / 2, 0):
            assert limit <= peak_bytes(candidate, activations, limit) <= exact
