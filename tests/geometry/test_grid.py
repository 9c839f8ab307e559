"""The grid numbers the ranks; its groups are the lines along its axes."""

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.grid import Coordinates, Grid

sizes = st.integers(1, 6)
grids = st.builds(Grid, sizes, sizes, sizes, ranks_per_node=st.integers(1, 9))


@given(grids)
def test_every_rank_has_its_own_place(grid):
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    assert len(set(places)) == grid.size
    assert [grid.rank(place) for place in places] == list(range(grid.size))
    assert all(
        0 <= place.tensor < grid.tensor
        and 0 <= place.data < grid.data
        and 0 <= place.pipeline < grid.pipeline
        for place in places
    )


@given(grids)
def test_the_groups_of_an_axis_partition_the_ranks(grid):
    for group_of, size in (
        (grid.tensor_group, grid.tensor),
        (grid.data_group, grid.data),
        (grid.pipeline_group, grid.pipeline),
    ):
        groups = {group_of(rank) for rank in range(grid.size)}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
        assert all(rank in group_of(rank) for rank in range(grid.size))


@given(grids)
def test_a_group_is_ordered_by_its_coordinate(grid):
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        assert grid.tensor_group(rank)[at.tensor] == rank
        assert grid.data_group(rank)[at.data] == rank
        assert grid.pipeline_group(rank)[at.pipeline] == rank


@given(tensor=sizes, data=sizes, pipeline=sizes, groups_a_node=st.integers(1, 4))
def test_tensor_ranks_share_a_node_that_holds_whole_groups(tensor, data, pipeline, groups_a_node):
    grid = Grid(tensor, data, pipeline, ranks_per_node=tensor * groups_a_node)
    for rank in range(grid.size):
        assert all(grid.same_node(rank, other) for other in grid.tensor_group(rank))


def test_the_order_is_tensor_then_data_then_pipeline():
    grid = Grid(tensor=2, data=3, pipeline=4, ranks_per_node=8)
    assert grid.coordinates(0) == Coordinates(0, 0, 0)
    assert grid.coordinates(1) == Coordinates(tensor=1, data=0, pipeline=0)
    assert grid.coordinates(2) == Coordinates(tensor=0, data=1, pipeline=0)
    assert grid.coordinates(6) == Coordinates(tensor=0, data=0, pipeline=1)


def test_a_node_is_a_run_of_ranks():
    grid = Grid(tensor=2, data=3, pipeline=2, ranks_per_node=8)
    assert [grid.node(rank) for rank in range(grid.size)] == [0] * 8 + [1] * 4
    assert grid.same_node(0, 7)
    assert not grid.same_node(7, 8)


def test_context_ranks_are_neighbours_that_read_the_same_samples():
    grid = Grid(tensor=2, data=6, pipeline=2, ranks_per_node=4, context=3)
    assert grid.replicas == 2
    by_place = {}
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        by_place.setdefault((at.tensor, at.pipeline, grid.replica(rank)), []).append(rank)
    for ranks in by_place.values():
        assert [grid.context_rank(rank) for rank in ranks] == [0, 1, 2]
        assert ranks == list(range(ranks[0], ranks[0] + 6, 2)), "one tensor group apart"
