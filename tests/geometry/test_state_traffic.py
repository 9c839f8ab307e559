"""Volumes of the partition's flows, by hand for the known schemes and against papers' formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.planning.state_traffic import StateTraffic
from frontier_lab.planning.unit_gathers import Gathers
from frontier_llm.geometry.formats import BF16, Format, LevelFormats, StateFormats
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.wire import Sent, all_reduce_bytes, gather_bytes
from tests.geometry.factors import any_factors

N, M = 1024, 3
GATHER, REDUCE, STATES, REFRESH = "gather_params", "reduce_grads", "reduce_states", "refresh_params"
micro_batches = st.integers(1, 16)


def make_traffic(params, grads, optimizer, data=8, per_node=4, **changes):
    grid = Grid(tensor=1, data=data, pipeline=1, ranks_per_node=per_node)
    factors = Factors(params, grads, optimizer, data)
    return StateTraffic(grid, factors, **{"micro_batches": M, "params_bytes": 2, **changes})


def count_elements(factors, times, size):
    """How many elements rank 0 sends for a unit."""
    grid = Grid(1, factors.data, 1, factors.data)
    sent = StateTraffic(grid, factors, times, params_bytes=4).unit(0, size)
    return {name: one * (1 / 4) for name, one in sent.items()}


def total(sent, *names):
    """Sum over links, of some collectives or of all."""
    return sum(s.total for name, s in sent.items() if name in names or not names)


# 8 data ranks on two nodes, 1024 elements, 3 micro-batches, parameters in bf16, gradients in fp32
BY_HAND = {
    "replicated": ((1, 1, 1), {STATES: 2 * 4 * 1024 * 7 / 8}),
    "zero1": ((1, 1, 8), {STATES: 4 * 1024 * 7 / 8, REFRESH: 2 * 1024 * 7 / 8}),
    "zero2": ((1, 8, 8), {REDUCE: 3 * 4 * 1024 * 7 / 8, REFRESH: 2 * 1024 * 7 / 8}),
    "zero3": ((8, 8, 8), {GATHER: 6 * 2 * 1024 * 7 / 8, REDUCE: 3 * 4 * 1024 * 7 / 8}),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_scheme_that_cuts_over_all_ranks_sends_around_one_ring(name):
    factors, volumes = BY_HAND[name]
    traffic = make_traffic(*factors)
    for rank in range(8):
        crosses = rank in (3, 7)  # the right neighbour is on the other node
        wanted = {k: Sent(network=v) if crosses else Sent(node=v) for k, v in volumes.items()}
        assert traffic.unit(rank, N) == wanted


@pytest.mark.parametrize("rank", range(8))
def test_mics_crosses_nodes_once_a_step(rank):
    assert make_traffic(4, 4, 4).unit(rank, N) == {
        GATHER: Sent(node=6 * 2 * 1024 * 3 / 4),
        REDUCE: Sent(node=3 * 4 * 1024 * 3 / 4),
        STATES: Sent(network=2 * 4 * 256 * 1 / 2),
    }


@pytest.mark.parametrize("rank", range(8))
def test_the_zeropp_factors_gather_parameters_inside_the_node(rank):
    assert make_traffic(4, 8, 8).unit(rank, N) == {
        GATHER: Sent(node=6 * 2 * 1024 * 3 / 4),
        REDUCE: Sent(node=3 * 4 * 1024 * 3 / 4, network=3 * 4 * 256 * 1 / 2),
        REFRESH: Sent(network=2 * 256 * 1 / 2),
    }


def test_four_digits_make_seven_flows():
    """Rank 1 of (2, 4, 8) on 16 ranks, 4 a node: its groups are (0 1), (1 3), (1 5) and (1 9)."""
    assert make_traffic(2, 4, 8, data=16).unit(1, N) == {
        GATHER: Sent(node=6 * 2 * 1024 * 1 / 2),
        REDUCE: Sent(node=3 * 4 * (1024 * 1 / 2 + 512 * 1 / 2)),
        STATES: Sent(network=4 * 256 * 1 / 2 + 2 * 4 * 128 * 1 / 2),
        REFRESH: Sent(node=2 * 512 * 1 / 2, network=2 * 256 * 1 / 2),
    }


def test_a_rank_is_placed_by_the_grid():
    """With two tensor ranks a node of 4 holds two data ranks, and the ring skips a rank."""
    grid = Grid(tensor=2, data=4, pipeline=2, ranks_per_node=4)
    traffic = StateTraffic(grid, Factors(1, 1, 4, 4), micro_batches=1, params_bytes=4)
    volume = 4 * 1024 * 3 / 4
    inside, outside = (grid.rank(Coordinates(1, data, 1)) for data in (0, 1))
    assert traffic.unit(inside, N)[REFRESH] == Sent(node=volume)
    assert traffic.unit(outside, N)[REFRESH] == Sent(network=volume)


def test_a_unit_may_be_gathered_as_often_as_it_is_read():
    assert make_traffic(8, 8, 8).unit(0, N, gathers=Gathers(1, 0))[GATHER] == Sent(
        node=2 * 1024 * 7 / 8
    )
    assert GATHER not in make_traffic(8, 8, 8).unit(0, N, gathers=Gathers(0, 0))


def test_formats_scale_their_own_flows():
    half = StateFormats(grads=LevelFormats(BF16, BF16, BF16))
    wide = make_traffic(2, 4, 8, data=16, params_bytes=4).unit(0, N)
    narrow = make_traffic(2, 4, 8, data=16, params_bytes=2, formats=half).unit(0, N)
    for name in (GATHER, REFRESH, REDUCE):
        assert total(wide, name) == 2 * total(narrow, name)
    scattered, summed = 256 * 1 / 2, 2 * 128 * 1 / 2
    assert total(wide, STATES) == 4 * scattered + 4 * summed
    assert total(narrow, STATES) == 2 * scattered + 4 * summed  # replicas add up in fp32


@given(any_factors(), micro_batches)
def test_hops_cost_what_one_flow_over_all_their_ranks_costs(factors, times):
    """A step's sums telescope: cutting a flow into digits adds no byte."""
    p, g, o, data = factors.params, factors.grads, factors.optimizer, factors.data
    size = factors.padded(1) * 8
    traffic = count_elements(factors, times, size)
    assert total(traffic, GATHER) == pytest.approx(2 * times * size * (1 - 1 / p))
    assert total(traffic, REDUCE) == pytest.approx(times * size * (1 - 1 / g))
    assert total(traffic, STATES) == pytest.approx(size * (1 / g + 1 / o - 2 / data))
    assert total(traffic, REFRESH) == pytest.approx(size * (1 / p - 1 / o))


@given(any_factors(), micro_batches)
def test_amsps_own_flows_send_more_where_the_factors_differ(factors, times):
    """AMSP's costs of a step (arXiv:2311.00257), elements of one width.

    Per micro-batch two gathers and a reduce-scatter over p; all-reduce of n/p over g/p in all but
    the last; all-reduce of n/p over D/p in the last; o/p broadcasts of n/o over o/p ranks, of
    which a rank sends each but for the last in line.
    """
    p, g, o, data = factors.params, factors.grads, factors.optimizer, factors.data
    size = factors.padded(1) * 8
    theirs = (
        times * 3 * gather_bytes(size, p)
        + (times - 1) * all_reduce_bytes(size / p, g // p)
        + all_reduce_bytes(size / p, data // p)
        + (o // p - 1) * size / o
    )
    saved = (times - 1) * (size / p - size / g) + size / p - size / o
    assert total(count_elements(factors, times, size)) == pytest.approx(theirs - saved)
    assert saved >= 0


@given(any_factors(), micro_batches)
def test_equal_factors_send_what_mics_sends(factors, times):
    """MiCS: reduce-scatter in the group in each micro-batch, all-reduce over groups in the last."""
    m, data = factors.optimizer, factors.data
    size = 8 * m
    ours = count_elements(Factors(m, m, m, data), times, size)
    theirs = times * 3 * gather_bytes(size, m) + all_reduce_bytes(size / m, data // m)
    assert total(ours) == pytest.approx(theirs)


def test_a_node_sends_no_more_than_zeropp_counts():
    """ZeRO++ (arXiv:2306.10209), bytes that leave a node, in sizes of the fp16 model.

    ZeRO-3 sends 3 a micro-batch, ZeRO++ 0.5 + 0 + 0.25; here 0.25 a micro-batch and 0.5 a step.
    """
    data, node, size, times = 64, 8, 64 * 1024, 4
    int8, int4 = (Format(name, block_elements=1024) for name in ("int8", "int4"))
    formats = StateFormats(int8, int8, int8, LevelFormats(int4, int4, int4))
    traffic = make_traffic(
        node, data, data, data, node, micro_batches=times, params_bytes=2, formats=formats
    )
    sent = [traffic.unit(rank, size) for rank in range(node)]
    ours = sum(s.network for one in sent for s in one.values()) / (2 * size)
    assert ours == pytest.approx((times * 0.25 + 0.5) * (1 - node / data), rel=0.03)
    assert ours < times * 0.75
