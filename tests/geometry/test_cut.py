"""Intervals that do not end inside a matrix: they cover buffers, nest, and are balanced."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.partition import Cut, Factors, whole_bounds

matrices = st.lists(st.integers(1, 40), max_size=6)
units = st.lists(st.tuples(matrices, st.integers(0, 9)), min_size=1, max_size=12)
chains = st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 2))


def buffers(items: list[tuple[list[int], int]]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the units of `whole_bounds`: matrices, and then what follows them."""
    return tuple(((0, *accumulate(sizes))[:-1], sum(sizes) + rest) for sizes, rest in items)


@given(units, st.integers(1, 9))
def test_bounds_cover_each_buffer_and_lie_between_matrices(
    items: list[tuple[list[int], int]], parts: int
) -> None:
    cases = buffers(items)
    for (starts, size), bounds in zip(cases, whole_bounds(cases, parts), strict=True):
        if not starts:
            assert bounds == ()
            continue
        assert len(bounds) == parts + 1
        assert (bounds[0], bounds[-1]) == (0, size)
        assert list(bounds) == sorted(bounds)
        assert set(bounds) <= {*starts, size}


@given(units, st.integers(1, 9))
def test_no_rank_has_much_more_than_the_others(
    items: list[tuple[list[int], int]], parts: int
) -> None:
    cases = tuple(case for case in buffers(items) if case[0])
    loads = [0] * parts
    for bounds in whole_bounds(cases, parts):
        loads = [
            load + stop - start
            for load, start, stop in zip(loads, bounds, bounds[1:], strict=False)
        ]
    largest = max((sum(sizes) + rest for sizes, rest in items), default=0)
    assert max(loads) <= sum(loads) / parts + largest


def test_ranks_take_as_much_as_they_can_below_the_lowest_limit() -> None:
    layer = ((0, 3, 4, 8), 12)
    first, second = whole_bounds((layer, layer), 6)
    assert first == (0, 4, 8, 12, 12, 12, 12)
    assert second == (0, 0, 0, 0, 4, 8, 12)


@given(chains, units)
def test_intervals_nest_and_are_held_once_per_copy(
    widths: tuple[int, int, int, int], items: list[tuple[list[int], int]]
) -> None:
    p, g, o, data = accumulate(widths, lambda a, b: a * b)
    factors = Factors(p, g, o, data)
    cases = tuple(case for case in buffers(items) if case[0])
    for (_, size), bounds in zip(cases, whole_bounds(cases, o), strict=True):
        cut = Cut(factors, size, bounds)
        for ranks in (1, p, g, o):
            held = sorted(cut.interval(rank, ranks) for rank in range(ranks))
            assert sum(interval.length for interval in held) == size
            assert all(a.stop == b.start for a, b in pairwise(held))
        for rank in range(data):
            for whole, parts in ((1, p), (1, g), (p, o), (g, o)):
                outer, inner = cut.interval(rank, whole), cut.interval(rank, parts)
                found = [outer.start + part for part in cut.parts(rank, whole, parts)]
                assert (found[0], found[-1]) == (outer.start, outer.stop)
                assert (inner.start, inner.stop) in pairwise(found)
