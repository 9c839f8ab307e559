"""Ranges and boxes: each element occurs once, and padding does not occur."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.checkpoint.stored_ranges import placed_ranges, split_into_boxes
from frontier_llm.protocols import Placement

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(st.data())
def test_boxes_are_the_range_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    numel = prod(shape)
    first = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(1, numel - first))
    numbers = np.arange(numel).reshape(shape)
    found = [
        numbers[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))].ravel()
        for start, extent in split_into_boxes(shape, first, count)
    ]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(first, first + count))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_placed_ranges_are_the_elements_that_a_box_covers(data: st.DataObject) -> None:
    local = data.draw(shapes)
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in local)
    extent = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(local, starts, strict=True))
    start = data.draw(st.integers(0, prod(local) - 1))
    count = data.draw(st.integers(1, prod(local) - start))
    box = Placement("x", extent, (0,) * len(local), starts, extent)
    numbers = np.arange(prod(local)).reshape(local)
    inside = numbers[tuple(slice(a, a + n) for a, n in zip(starts, extent, strict=True))].ravel()
    wanted = [n for n in inside.tolist() if start <= n < start + count]
    found = []
    for part in placed_ranges([box], local, start, count):
        in_shard = np.arange(start, start + count)[part.offset : part.offset + part.count]
        in_box = inside[part.first : part.first + part.count]
        np.testing.assert_array_equal(in_shard, in_box)
        found += in_shard.tolist()
    assert found == wanted


def test_padding_between_two_boxes_is_left_out() -> None:
    gate = Placement("gate", (6, 2), (3, 0), (0, 0), (3, 2))
    up = Placement("up", (6, 2), (3, 0), (4, 0), (3, 2))
    parts = list(placed_ranges([gate, up], (8, 2), start=4, count=6))
    assert [(p.placement.name, p.first, p.count, p.offset) for p in parts] == [
        ("gate", 4, 2, 0),
        ("up", 0, 2, 4),
    ]


def test_a_box_of_parts_of_rows_gives_one_range_per_row() -> None:
    box = Placement("x", (2, 2), (0, 0), (1, 1), (2, 2))
    parts = list(placed_ranges([box], (3, 4), start=0, count=12))
    assert [(p.first, p.count, p.offset) for p in parts] == [(0, 2, 5), (2, 2, 9)]
