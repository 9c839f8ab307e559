"""Volumes of rings, and on which links they go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.wire import Sent, all_reduce_bytes, gather_bytes, ring_sent


@given(st.integers(1, 1 << 40), st.integers(1, 4096))
def test_an_all_reduce_is_a_reduce_scatter_and_a_gather(total_bytes, ranks):
    assert all_reduce_bytes(total_bytes, ranks) == pytest.approx(
        2 * gather_bytes(total_bytes, ranks)
    )
    assert gather_bytes(total_bytes, ranks) < total_bytes


def test_one_rank_sends_nothing():
    assert all_reduce_bytes(1000, 1) == gather_bytes(1000, 1) == 0


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_a_ring_crosses_nodes_once_for_each_node_it_visits(tensor, data, pipeline, per_node):
    grid = Grid(tensor, data, pipeline, per_node)
    for rank in range(grid.size):
        group = grid.data_group(rank)
        sent = [ring_sent(grid, member, group, 1.0) for member in group]
        nodes = {grid.node(member) for member in group}
        assert sum(s.network for s in sent) == (len(nodes) if len(nodes) > 1 else 0)
        assert sum(s.total for s in sent) == len(group)


def test_sent_bytes_add_up_by_link():
    assert Sent(1, 2) + Sent(10, 20) == Sent(11, 22)
