"""Chains of factors for the tests of this folder."""

from hypothesis import strategies as st

from frontier_llm.geometry.partition import Factors


def _divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def any_factors(draw, most=64):
    """Draw params | grads | optimizer | data, with data up to `most`, with and without borders."""
    data = draw(st.integers(1, most))
    optimizer = draw(st.sampled_from(_divisors(data)))
    grads = draw(st.sampled_from(_divisors(optimizer)))
    params = draw(st.sampled_from(_divisors(grads)))
    borders = tuple(sorted(draw(st.sets(st.sampled_from(_divisors(data)), max_size=2))))
    return Factors(params, grads, optimizer, data, borders=borders)
