"""Intervals tile and nest; every collective runs along one digit over contiguous parts."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config.sharding import ShardingConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Coordinates, Grid, data_ranks_per_node, level_borders
from frontier_llm.geometry.partition import DIGITS, Digits, Factors, Interval
from tests.geometry.factors import any_factors

units = st.integers(1, 500)


def intervals(factors, size, rank):
    """The intervals of parameters, gradients and optimizer states."""
    widths = (factors.params, factors.grads, factors.optimizer)
    return tuple(factors.interval(size, rank, width) for width in widths)


def make_sharding(params, grads, optimizer):
    return ShardingConfig(
        name="test", params=params, grads=grads, optimizer=optimizer, units_in_flight=2
    )


@given(any_factors())
def test_digits_and_data_ranks_are_one_to_one(factors):
    digits = [factors.digits(rank) for rank in range(factors.data)]
    assert len(set(digits)) == factors.data
    widths = Digits(*(factors.width(name) for name in DIGITS))
    assert all(0 <= digit < width for at in digits for digit, width in zip(at, widths, strict=True))


@given(any_factors(), units)
def test_the_ranks_of_a_replica_tile_the_buffer_with_each_state(factors, elements):
    size = factors.padded(elements)
    for factor in (factors.params, factors.grads, factors.optimizer):
        parts = sorted({factors.interval(size, rank, factor) for rank in range(factors.data)})
        assert len(parts) == factor
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == size


@given(any_factors(), units)
def test_optimizer_lies_in_gradients_lie_in_parameters(factors, elements):
    size = factors.padded(elements)
    for rank in range(factors.data):
        outer, middle, inner = intervals(factors, size, rank)
        assert outer.start <= middle.start <= inner.start
        assert inner.stop <= middle.stop <= outer.stop


@given(any_factors(), units)
def test_a_gather_along_a_hop_is_contiguous_in_its_order(factors, elements):
    """A reduce-scatter is the mirror image: the i-th rank keeps part i."""
    size = factors.padded(elements)
    for hop in (hop for digit in DIGITS[:3] for hop in factors.hops(digit)):
        for rank in range(factors.data):
            parts = [factors.interval(size, member, hop.high) for member in hop.group(rank)]
            wanted = factors.interval(size, rank, hop.low)
            assert parts[0].start == wanted.start
            assert all(a.stop == b.start for a, b in pairwise(parts))
            assert parts[-1].stop == wanted.stop
            assert {factors.interval(size, r, hop.low) for r in hop.group(rank)} == {wanted}


@given(any_factors())
def test_the_hops_of_a_digit_end_at_borders_and_at_its_ends(factors):
    for digit in DIGITS:
        hops, whole = factors.hops(digit), factors.whole(digit)
        assert bool(hops) == (factors.width(digit) > 1)
        assert all(hop.width > 1 for hop in hops)
        ends = [hop.low for hop in hops] + [hop.high for hop in hops[-1:]]
        assert ends in ([], [whole.low, *ends[1:-1], whole.high])
        assert set(ends[1:-1]) <= set(factors.borders)


@given(any_factors(), units)
def test_ranks_along_the_last_digit_hold_the_same(factors, elements):
    size = factors.padded(elements)
    for rank in range(factors.data):
        replicas = factors.whole("replica").group(rank)
        assert len({intervals(factors, size, member) for member in replicas}) == 1


@given(any_factors())
def test_the_groups_of_a_hop_partition_the_ranks(factors):
    for hop in factors.collective_hops:
        groups = {hop.group(rank) for rank in range(factors.data)}
        assert sorted(rank for group in groups for rank in group) == list(range(factors.data))
        for group in groups:
            assert [hop.value(rank) for rank in group] == list(range(hop.width))


@given(any_factors(), units)
def test_padding_is_the_least_that_aligns_intervals(factors, elements):
    size = factors.padded(elements)
    multiple = factors.multiple()
    assert size % multiple == 0
    assert (size // factors.optimizer) % 64 == 0, "not aligned for a GPU"
    assert elements <= size < elements + multiple


@given(any_factors(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 64), st.integers(1, 4))
def test_parameters_are_gathered_inside_a_node_if_a_copy_fits_there(
    factors, tensor, pipeline, copies, nodes
):
    per_node = factors.params * copies
    factors = Factors(factors.params, factors.params, factors.params, per_node * nodes)
    grid = Grid(tensor, per_node * nodes, pipeline, ranks_per_node=tensor * per_node)
    assert data_ranks_per_node(grid) == per_node
    ranks = grid.data_group(grid.rank(Coordinates(tensor - 1, 0, pipeline - 1)))
    for rank in range(factors.data):
        group = factors.whole("params").group(rank)
        assert len({grid.node(ranks[member]) for member in group}) == 1


def test_the_layout_of_two_four_eight_on_sixteen_ranks():
    factors = Factors(params=2, grads=4, optimizer=8, data=16)
    assert factors.digits(13) == Digits(params=1, grads=0, optimizer=1, replica=1)
    assert intervals(factors, 32, 13) == (Interval(16, 16), Interval(16, 8), Interval(20, 4))
    groups = {digit: factors.whole(digit).group(13) for digit in DIGITS}
    assert groups == {
        "params": (12, 13),
        "grads": (13, 15),
        "optimizer": (9, 13),
        "replica": (5, 13),
    }


@pytest.mark.parametrize(
    ("grid", "wanted"),
    [
        (Grid(1, 8, 1, ranks_per_node=4), 4),
        (Grid(2, 8, 2, ranks_per_node=8), 4),
        (Grid(8, 4, 2, ranks_per_node=4), 1),  # tensor ranks fill more than a node
        (Grid(1, 4, 2, ranks_per_node=16), 4),
        (Grid(1, 8, 1, ranks_per_node=3), None),
        (Grid(1, 4, 3, ranks_per_node=6), None),  # the middle stage lies on two nodes
        (Grid(2, 3, 1, ranks_per_node=3), None),  # tensor ranks differ in it
    ],
)
def test_data_ranks_per_node_is_none_if_nodes_differ(grid, wanted):
    assert data_ranks_per_node(grid) == wanted


def test_a_digit_over_two_nodes_has_two_hops():
    grid = Grid(1, 8, 1, ranks_per_node=4, ranks_per_package=2)
    assert level_borders(grid) == (2, 4)
    factors = Factors(1, 1, 8, 8, borders=level_borders(grid))
    hops = factors.hops("optimizer")
    assert [hop.group(5) for hop in hops] == [(4, 5), (5, 7), (1, 5)]
    assert [grid.farthest_level(hop.group(5)) for hop in hops] == ["package", "node", "network"]
    # rank 5 = 1 of a package, 0 of the packages of a node, 1 of the nodes
    assert factors.interval(64, 5, 8) == Interval(32 + 8, 8)
    assert replace(factors, borders=()).interval(64, 5, 8) == Interval(40, 8)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ((1, 1, "all"), (1, 1, 16)),
        (("node", "node", "node"), (4, 4, 4)),
        (("node", "all", "all"), (4, 16, 16)),
        ((2, "node", 8), (2, 4, 8)),
        (("package", "node", "all"), (2, 4, 16)),
    ],
)
def test_words_become_integers(written, wanted):
    assert Factors.resolve(make_sharding(*written), Grid(1, 16, 1, 4, 2)) == Factors(*wanted, 16)


def test_uneven_nodes_matter_only_to_the_word_node():
    grid = Grid(1, 8, 1, ranks_per_node=3)
    whole = Factors.resolve(make_sharding(1, 2, "all"), grid)
    assert whole == Factors(1, 2, 8, 8)
    with pytest.raises(ConfigError) as caught:
        Factors.resolve(make_sharding("node", "all", "all"), grid)
    assert caught.value.key == "sharding.params"
    assert "set sharding.params to one of 1, 2, 4, 8" in caught.value.todo


# (configured factors, key in the error, correction in the error); 8 ranks, 4 per node
REJECTED = [
    ((2, 1, 1), "sharding.grads", "set sharding.grads=2 sharding.optimizer=2"),
    ((3, "all", "all"), "sharding.params", "set sharding.params=4"),
    ((0, 1, 1), "sharding.params", "set sharding.params=1"),
    ((1, -1, 1), "sharding.grads", "set sharding.grads=1"),
    ((16, "all", "all"), "sharding.params", "set sharding.params=8"),
    (("node", 2, 2), "sharding.grads", "set sharding.grads=4 sharding.optimizer=4"),
    ((2, "all", "node"), "sharding.optimizer", "set sharding.optimizer=8"),
]


@pytest.mark.parametrize(("written", "key", "todo"), REJECTED)
def test_factors_that_do_not_divide_are_rejected_with_a_correction(written, key, todo):
    config = make_sharding(*written)
    with pytest.raises(ConfigError) as caught:
        Factors.resolve(config, Grid(1, 8, 1, 4))
    assert (caught.value.key, caught.value.todo) == (key, todo)
    changes = {name: int(value) for name, value in re.findall(r"sharding\.(\w+)=(\d+)", todo)}
    Factors.resolve(config.model_copy(update=changes), Grid(1, 8, 1, 4))


def test_an_error_gives_the_number_that_a_word_means():
    with pytest.raises(ConfigError) as caught:
        Factors.resolve(make_sharding(2, "all", "node"), Grid(1, 8, 1, 4))
    assert caught.value.got == "node (4), with params=2, grads=all on 8 data-parallel ranks"
    assert caught.value.wants.startswith("one of 8: params divides grads")
