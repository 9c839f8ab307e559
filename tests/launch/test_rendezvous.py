"""How ranks meet: the store of rank 0, and the process group of all ranks."""

import os
import re
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from frontier_llm.errors import LaunchError
from frontier_llm.launch import rendezvous
from frontier_llm.launch.rendezvous import init_process_group, listen, make_store
from frontier_llm.launch.world import World
from tests.launch.test_world import SRUN
from tests.patience import patient
from tests.ports import reserved_port
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
VERY_LONG = timedelta(hours=1)
"""A time limit of the program that no test waits for."""


def _world(rank, size, port):
    return World(rank, size, rank, size, "here", "slurm", "127.0.0.1", port, "job")


@pytest.fixture
def port():
    with reserved_port() as found:
        yield found


@pytest.mark.parametrize(
    ("found", "ranks_per_node", "address"),
    [
        (["127.0.0.1"], 4, "127.0.0.1"), (["127.0.1.1"], 2, ""), (["10.255.255.1"], 2, ""),
        (["127.0.0.1", "127.0.0.2"], 4, ""), ([], 2, ""), (["::1"], 4, ""),
    ],
    ids=["one node", "own name on loopback", "of a gateway", "several", "unknown", "IPv6"],
)  # fmt: skip
def test_a_store_listens_only_where_its_ranks_look_for_it(
    monkeypatch, found, ranks_per_node, address
):
    def resolve(*_, **__):
        if not found:
            raise OSError
        return [
            (socket.AF_INET6 if ":" in name else socket.AF_INET, 1, 6, "", (name, 0))
            for name in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    world = World(0, 4, 0, ranks_per_node, "here", "slurm", "here", 1)
    assert rendezvous._only_address(world) == address


def test_a_taken_port_fails_without_waiting():
    with listen("", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on .* is in use: set launch.port "):
            make_store(_world(0, 2, port), VERY_LONG)


def test_waiting_for_rank_zero_times_out_with_its_address(port):
    with pytest.raises(LaunchError, match=rf"127.0.0.1:{port} within 1 s.*that rank 0 started"):
        make_store(_world(1, 2, port), timedelta(seconds=1))


def test_rank_zero_gives_up_early_if_no_more_ranks_come(port):
    def come() -> None:
        with pytest.raises(LaunchError, match=r"did not reach rank 0's store"):
            make_store(_world(1, 3, port), VERY_LONG)

    with ThreadPoolExecutor() as pool:
        other = pool.submit(come)
        with pytest.raises(LaunchError, match=r"1 of 3 ranks did not connect .* absent: rank 2"):
            make_store(_world(0, 3, port), VERY_LONG, quiet=timedelta(seconds=patient(0.1)))
        other.result()


def test_rank_zero_names_the_absent_ranks(port):
    with pytest.raises(LaunchError, match=r"1 of 2 ranks did not connect .* absent: rank 1"):
        make_store(_world(0, 2, port), timedelta(seconds=1))


def test_the_store_of_another_job_at_the_same_port_is_ignored():
    server = listen("127.0.0.1", 0)
    port = server.getsockname()[1]
    ours = make_store(_world(0, 1, port), VERY_LONG, server.detach())
    ours.set("key", "value")
    other = World(1, 2, 1, 2, "here", "slurm", "127.0.0.1", port, "other job")
    with pytest.raises(LaunchError, match="that rank 0 started"):
        make_store(other, timedelta(seconds=1))


def _limited(soft, hard, size):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        with reserved_port() as port:
            make_store(_world(0, size, port), timedelta(seconds=1), connections=12)
    except LaunchError as error:
        return str(error), resource.getrlimit(resource.RLIMIT_NOFILE)


def test_rank_zero_may_open_a_file_for_each_connection_of_each_rank():
    (text, (soft, hard)) = run_ranks(lambda _: _limited(300, 1500, 100), 1)[0]
    assert "99 of 100 ranks did not connect" in text
    assert (soft, hard) == (1456, 1500)
    (text, (soft, _)) = run_ranks(lambda _: _limited(300, 600, 100), 1)[0]
    assert re.search(r"may open 600 files on .* and needs 1456.* of 100 ranks", text)
    assert soft == 300


SUM = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from frontier_llm.launch import rendezvous
from frontier_llm.launch.rendezvous import init_process_group, make_store
from frontier_llm.launch.world import World
world = World.from_environment(os.environ)
store = make_store(world, timedelta(hours=1))
init_process_group(world, store, "gloo", timedelta(hours=1))
tensor = torch.tensor([world.rank + 1.0])
dist.all_reduce(tensor)
sys.stdout.write(f"{world.launcher} {world.rank}/{world.size} sum {tensor.item()}\\n")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
"""


def _root(request):
    return str(request.config.rootpath)


def test_ranks_of_torchrun_meet_at_its_agents_store(tmp_path, request):
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        # a container's own host name may have no address
        [*command, "--local-addr=localhost", str(script)],
        env={**os.environ, "PYTHONPATH": _root(request)},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [
        "torchrun 0/2 sum 3.0",
        "torchrun 1/2 sum 3.0",
    ]


@pytest.mark.exhaustive
def test_tasks_of_srun_meet_at_rank_zero(request):
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", SUM],
            env={
                **{key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS")},
                **SRUN,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_JOB_ID": str(os.getpid()),
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": _root(request),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = sorted(task.communicate(timeout=patient(60))[0] for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0]
    assert outputs == ["slurm 0/2 sum 3.0\n", "slurm 1/2 sum 3.0\n"]


def test_one_rank_needs_no_peer():
    server = listen("127.0.0.1", 0)
    world = _world(0, 1, server.getsockname()[1])
    store = make_store(world, VERY_LONG, server.detach())
    init_process_group(world, store, "gloo", VERY_LONG)
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
