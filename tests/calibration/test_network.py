"""The comparison of the network under several sets of environment variables."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from frontier_lab.calibration import network
from frontier_lab.calibration.links import network_speeds
from frontier_lab.calibration.network import Outcome
from frontier_lab.commands.doctor import main
from frontier_llm.cli.experiments import composed
from frontier_llm.launch.world import World
from tests.patience import patient
from tests.ranks import run_ranks

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


def world(rank: int, ranks_per_node: int = 8) -> World:
    """Return the place of a rank of two nodes, whose store is not there."""
    return World(rank, 16, rank, ranks_per_node, "here", "local", "127.0.0.1", 1)


def test_the_links_promise_what_the_cluster_file_says():
    cluster = composed("cluster=a100_80g").cluster
    speeds = network.predicted(cluster, world(0)).gb_per_second
    nvlink, infiniband = 300 * 0.77, 25 * 0.78 / 1.03
    ring = min(nvlink, 8 * infiniband)  # a ring leaves a node once, over the links of its 8 ranks
    assert list(speeds) == KINDS
    assert speeds["all_reduce"] == pytest.approx(ring)
    assert speeds["all_to_all"] == pytest.approx(infiniband * 15 / 8)  # 8 of 15 bytes leave a node
    assert speeds["send"] == pytest.approx(25 * 0.78, rel=1e-3)


def _speeds(_: World) -> dict[str, float]:
    found = network_speeds((1 << 12, 1 << 14), calls=2)
    assert dist.get_world_size() == 3
    return {kind: speed.bytes_per_second for kind, speed in found.items()}


def test_all_ranks_measure_the_same_speed_of_every_kind():
    first, *others = run_ranks(_speeds, 3)
    assert list(first) == KINDS
    assert all(speed > 0 for speed in first.values())
    assert others == [pytest.approx(first), pytest.approx(first)]


def test_the_table_says_why_a_set_has_no_figures():
    good = Outcome("file", dict.fromkeys(KINDS, 12.34))
    found = network.table([good, Outcome("X=1", {}, "hangs")], world(0))
    assert found.title == "GB/s that each of 16 ranks on 2 nodes sends"
    cells = [list(column.cells) for column in found.columns[:3]]
    assert cells == [["file", "X=1"], ["12.3", "hangs"], ["12.3", ""]]


def _hang_or_fail(place: World, name: str, _: object) -> None:
    if os.environ.get("NCCL_X") != "1" or "NCCL_Y" in os.environ:
        raise SystemExit(9)
    if name == "hang":
        signal.pause()


def test_a_set_has_its_variables_and_is_ended_if_it_hangs(monkeypatch):
    monkeypatch.setattr(network, "_measure", _hang_or_fail)
    limit = timedelta(seconds=round(patient(0.75)))
    monkeypatch.setattr(network, "LIMIT", limit)
    monkeypatch.setattr(network.multiprocessing, "get_context", lambda _: _fork())
    monkeypatch.setenv("NCCL_Y", "2")
    wanted = {"NCCL_X": "1", "NCCL_Y": None}
    hanging = network._measure_set("hang", wanted, world(1))
    assert hanging.failure == f"hangs: killed after {limit.seconds} s"
    assert network._measure_set("end", wanted, world(1)) == Outcome("end", {})
    assert network._measure_set("fail", {}, world(1)).failure == "fails with exit code 9"
    assert os.environ["NCCL_Y"] == "2"
    assert "NCCL_X" not in os.environ


def _fork() -> object:
    import multiprocessing.context

    return multiprocessing.context.ForkContext()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.forked
def test_doctor_measures_every_set_in_new_processes(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    other = "[{variables: {GLOO_SOCKET_IFNAME: absent}, reason: a test, source: none}]"
    no_layout = "data.global_batch=7"  # which training would refuse
    arguments = ["launch.ranks=2", no_layout, f"cluster.environment_alternatives={other}"]
    assert main(["--network", *arguments]) == 0
    out = capfd.readouterr().out
    assert "measuring 2 of 2: GLOO_SOCKET_IFNAME=absent" in out
    row = re.search(r"as set .*", out)
    assert row
    assert len([float(number) for number in re.findall(r"[\d.]+", row[0])]) == 5
    assert re.search(r"GLOO_SOCKET_IFNAME=absent +. fails with exit code 1", out)
    assert "GLOO_SOCKET_IFNAME=absent: a test (none)" in out
