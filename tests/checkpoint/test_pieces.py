"""Runs and boxes: nothing lost, nothing twice, padding left out."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.checkpoint.pieces import blocks, covered
from frontier_llm.protocols import Placement

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(st.data())
def test_blocks_are_the_run_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    numel = prod(shape)
    first = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(1, numel - first))
    numbers = np.arange(numel).reshape(shape)
    found = [
        numbers[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))].ravel()
        for start, extent in blocks(shape, first, count)
    ]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(first, first + count))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_what_a_box_covers_of_a_run(data: st.DataObject) -> None:
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
    for part in covered([box], local, start, count):
        in_shard = np.arange(start, start + count)[part.offset : part.offset + part.count]
        in_box = inside[part.first : part.first + part.count]
        np.testing.assert_array_equal(in_shard, in_box)
        found += in_shard.tolist()
    assert found == wanted


def test_two_boxes_and_padding_between() -> None:
    gate = Placement("gate", (6, 2), (3, 0), (0, 0), (3, 2))
    up = Placement("up", (6, 2), (3, 0), (4, 0), (3, 2))
    parts = list(covered([gate, up], (8, 2), start=4, count=6))
    assert [(p.placement.name, p.first, p.count, p.offset) for p in parts] == [
        ("gate", 4, 2, 0),
        ("up", 0, 2, 4),
    ]


def test_rows_that_do_not_follow_each_other() -> None:
    box = Placement("x", (2, 2), (0, 0), (1, 1), (2, 2))
    parts = list(covered([box], (3, 4), start=0, count=12))
    assert [(p.first, p.count, p.offset) for p in parts] == [(0, 2, 5), (2, 2, 9)]
