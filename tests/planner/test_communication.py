"""Collectives take the time of the links that their groups cross."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.cli.experiments import composed
from frontier_llm.config.cluster import CollectiveSpeed
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.planner.communication import GridGroups, Network
from tests.properties import examples


@pytest.fixture(scope="module")
def frontier():
    return composed("cluster=frontier_mi250x").cluster


def _bandwidths(cluster):
    return {link.name: link.gb_per_second * 1e9 * link.efficiency for link in cluster.links}


def _start(cluster):
    """Seconds of a collective without its steps."""
    return cluster.device.calibration.collective_us * 1e-6


def test_neighbours_use_the_nearest_link(frontier):
    span = Network(frontier, 8).span(2, 1)
    assert (span.link, span.bandwidth) == ("package", _bandwidths(frontier)["package"])


def test_ranks_that_share_a_domain_share_its_way_out(frontier):
    speed = _bandwidths(frontier)
    network, shared = Network(frontier, 8), 1 + frontier.links[-1].contention
    # a ring over whole nodes leaves each node once: it may use what all eight ranks may
    assert network.span(16, 1).bandwidth == pytest.approx(
        min(8 * speed["network"] / shared, 2 * speed["node"])
    )
    # one rank a node: its own share alone
    assert network.span(2, 8).bandwidth == pytest.approx(speed["network"] / shared)
    assert network.span(2, 8).link == "network"


def test_a_larger_group_is_never_faster(frontier):
    network = Network(frontier, 8)
    for stride in (1, 2, 8, 64):
        times = [network.span(w, stride).gather(1e9 * (w - 1) / w).seconds for w in (2, 4, 8, 32)]
        assert times == sorted(times)


def test_messages_cost_a_ring_of_latencies_each(frontier):
    span = Network(frontier, 8).span(32, 8)
    one, ten = span.gather(1e6, 1).seconds, span.gather(1e6, 10).seconds
    assert ten - one == pytest.approx(9 * (_start(frontier) + 31 * 20e-6))


def test_an_all_reduce_over_many_nodes_takes_a_tree(frontier):
    span = Network(frontier, 8).span(128, 8)
    assert span.all_reduce(0.0).seconds == pytest.approx(_start(frontier) + 2 * 7 * 20e-6)
    assert span.gather(0.0).seconds == pytest.approx(_start(frontier) + 127 * 20e-6)


def test_inside_a_node_the_tree_of_an_all_reduce_is_a_chain(frontier):
    nodes, per_node = 16, 8
    package, node, network = (link.latency_us * 1e-6 for link in frontier.links)
    chain = 2 * (package + 3 * node)  # in a package, then over the four packages of a node
    tree = 2 * 4 * network
    seconds = Network(frontier, per_node).span(nodes * per_node, 1).all_reduce(0.0).seconds
    assert seconds == pytest.approx(_start(frontier) + chain + tree)


def test_few_nodes_send_less_than_a_ring_in_an_all_reduce():
    """Of B bytes, each rank of a node sends its part of the sum, where a ring sends 15/8 of it."""
    cluster = composed("cluster=a100_80g_4x100gb").cluster
    span, far = Network(cluster, 8).span(16, 1), cluster.links[-1]
    bandwidth = far.gb_per_second * 1e9 * far.efficiency / (1 + far.contention)
    ring_bytes = 1e12 * 2 * 15 / 16
    parts = span.all_reduce(ring_bytes).seconds * bandwidth
    assert parts == pytest.approx(1e12 / 8, rel=0.02)
    assert span.gather(ring_bytes).seconds > 1.8 * span.all_reduce(ring_bytes).seconds


def test_more_nodes_share_the_network(frontier):
    two, many = (Network(frontier, 8).span(nodes, 8).bandwidth for nodes in (2, 64))
    contention = frontier.links[-1].contention
    assert two / many == pytest.approx((1 + 6 * contention) / (1 + contention))
    assert two > many


def test_an_exchange_between_nodes_uses_each_rank_s_own_link(frontier):
    groups = GridGroups(Network(frontier, 8), Grid(1, 64, 1, 8))
    network = frontier.links[-1]
    rate = network.gb_per_second * 1e9 * network.efficiency / (1 + 3 * network.contention)
    everywhere = groups.data(64, 1)
    assert everywhere.exchange_bandwidth == pytest.approx(rate * 63 / 56)
    assert everywhere.bandwidth > 5 * everywhere.exchange_bandwidth
    one_per_node = groups.data(8, 8)
    assert one_per_node.exchange_bandwidth == pytest.approx(one_per_node.bandwidth)
    sent = 1e9
    assert everywhere.exchange(sent).seconds == pytest.approx(sent / rate * 56 / 63, rel=1e-3)


def test_one_rank_talks_to_nobody(frontier):
    assert Network(frontier, 8).span(1, 1).gather(0.0, 5).seconds == 0


def test_stages_talk_over_the_slowest_link_between_them(frontier):
    network = Network(frontier, 8)
    assert GridGroups(network, Grid(4, 1, 2, 8)).send(1e6).link == "node"
    assert GridGroups(network, Grid(4, 1, 16, 8)).send(1e6).link == "network"
    assert GridGroups(network, Grid(4, 2, 16, 8)).send(1e6).link == "network"


def test_the_ends_of_a_pipeline_may_lie_further_apart_than_its_stages(frontier):
    groups = GridGroups(Network(frontier, 8), Grid(1, 2, 4, 8))
    assert groups.send(1e6).link == "node"
    assert groups.send(1e6, stages=3).link == "node"
    groups = GridGroups(Network(frontier, 2), Grid(1, 1, 3, 2))
    assert groups.send(1e6, stages=2).link == "network"


def _levels(pairs):
    """Return the indices of the links of Frontier over which pairs of ranks communicate."""
    sizes = (2, 8)  # of a package and of a node
    return {sum(one // size != other // size for size in sizes) for one, other in pairs}


def _costs(cluster, grid, width, stride, stages):
    groups = GridGroups(Network(cluster, 8), grid)
    sent, data = 1e3, groups.data(width, stride)
    return {
        "tensor": groups.tensor.all_reduce(sent).seconds,
        "gather": data.gather(sent).seconds,
        "exchange": data.exchange(sent).seconds,
        "send": groups.send(sent, stages).seconds,
    }


@examples(150)
@given(st.data())
def test_a_cost_grows_with_each_used_link_and_no_other(frontier, draw):
    tensor, data, pipeline = (draw.draw(st.integers(1, most)) for most in (9, 12, 6))
    width = draw.draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0]))
    stride = draw.draw(st.sampled_from([n for n in range(1, data + 1) if data // width % n == 0]))
    stages = draw.draw(st.integers(1, max(1, pipeline - 1)))
    grid = Grid(tensor, data, pipeline, 8, 2)
    whole = range(grid.size)
    blocks = [[*range(start, start + width * stride, stride)] for start in range(data)
              if start % (width * stride) < stride]  # fmt: skip
    of_data = [
        [grid.rank(Coordinates(t, d, p)) for d in block]
        for block in blocks for t in range(tensor) for p in range(pipeline)
    ]  # fmt: skip
    apart = tensor * data * stages
    pairs = {
        "tensor": [pair for rank in whole for pair in combinations(grid.tensor_group(rank), 2)],
        "gather": [pair for group in of_data for pair in combinations(group, 2)],
        "send": [(rank, rank + apart) for rank in whole if rank + apart < grid.size],
    }
    pairs["exchange"] = pairs["gather"]
    before = _costs(frontier, grid, width, stride, stages)
    for index, link in enumerate(frontier.links):
        slow = {"latency_us": 1e6 * link.latency_us, "gb_per_second": 1e-6 * link.gb_per_second}
        links = list(frontier.links)
        links[index] = link.model_copy(update=slow)
        changed = frontier.model_copy(update={"links": tuple(links)})
        for name, seconds in _costs(changed, grid, width, stride, stages).items():
            if name == "send" and pipeline == 1:
                continue  # nothing is sent
            if index in _levels(pairs[name]):
                assert seconds > before[name], (name, link.name)
            else:
                assert seconds == before[name], (name, link.name)


def test_smaller_nodes_than_the_clusters_end_where_they_say(frontier):
    assert Network(frontier, 4).span(8, 1).link == "network"
    assert Network(frontier, 8).span(8, 1).link == "node"


def test_measured_collectives_replace_those_of_the_link():
    cluster = composed("cluster=cpu_laptop").cluster
    speed = CollectiveSpeed(latency_us=100, gb_per_second=0.5)
    link = cluster.links[0].model_copy(update={"collectives": {"all_reduce": speed}})
    measured = cluster.model_copy(update={"links": (link,)})
    before, after = (Network(each, 4).span(3, 1) for each in (cluster, measured))
    # four steps around the ring in each of two calls
    assert after.all_reduce(1e9, 2).seconds == pytest.approx(2 + 2 * 4 * 100e-6)
    assert after.gather(1e9, 2) == before.gather(1e9, 2)
    assert after.collective("all_gather", 1e9, 2) == before.gather(1e9, 2)
