"""Which rank am I: srun's and torchrun's variables, and how ranks meet."""

import os
import re
import resource
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.errors import LaunchError
from frontier_llm.parallel import slurm
from frontier_llm.parallel.cores import share
from frontier_llm.parallel.slurm import equal_tasks, hosts, job_port
from frontier_llm.parallel.world import World, init_process_group, listen, make_store
from tests.ranks import run_ranks

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "5",
    "SLURM_STEP_NODELIST": "frontier[00017-00018]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
}


def test_srun():
    world = World.from_environment(SRUN)
    assert (world.rank, world.size, world.local_rank, world.ranks_per_node) == (5, 16, 5, 8)
    assert (world.launcher, world.master_address) == ("slurm", "frontier00017")
    assert world.master_port == job_port("4711", "0")


def test_torchrun():
    world = World.from_environment(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.ranks_per_node) == (3, 4, 1, 2)
    assert (world.launcher, world.master_address, world.master_port) == ("torchrun", "node7", 29400)


def test_the_address_can_be_set_under_srun():
    world = World.from_environment({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (world.launcher, world.master_address, world.master_port) == ("slurm", "10.0.0.1", 4000)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "left over", "MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16"},  # salloc
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},  # sbatch
        {**SRUN, "SLURM_STEP_ID": "4294967290"},  # salloc's own shell as a step
        {**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "39000"},  # srun --pty
    ],
)
def test_a_shell_is_not_a_rank(environ):
    assert World.from_environment(environ) is None


def test_only_a_task_of_a_requeued_job_is_started_again():
    assert not slurm.started_again(SRUN)
    assert slurm.started_again({**SRUN, "SLURM_RESTART_COUNT": "1"})
    assert not slurm.started_again({"SLURM_RESTART_COUNT": "1"})  # a shell of it


def test_the_same_rank_said_twice_is_fine():
    both = {**SRUN, **TORCHRUN, "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5"}
    both["LOCAL_WORLD_SIZE"] = "8"
    assert World.from_environment(both).rank == 5


def test_a_script_may_export_some_of_torchruns_variables_for_srun():
    assert World.from_environment({**SRUN, "WORLD_SIZE": "16"}).launcher == "slurm"


def test_torchrun_as_the_task_of_srun():
    agents = {**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    agents["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    world = World.from_environment({**agents, **TORCHRUN, "GROUP_WORLD_SIZE": "2"})
    assert (world.launcher, world.rank, world.size) == ("torchrun", 3, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "3", "WORLD_SIZE": "16"}, ("RANK=3", "SLURM_PROCID=5")),
        ({"WORLD_SIZE": "8"}, ("WORLD_SIZE=8", "SLURM_NTASKS=16")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, ("4(x2),3", "--ntasks-per-node")),
        ({"SLURM_LOCALID": "2"}, ("--distribution=block",)),
        ({"SLURM_LOCALID": None}, ("SLURM_LOCALID",)),
        ({"SLURM_STEP_NODELIST": None}, ("SLURM_STEP_NODELIST",)),
    ],
)
def test_srun_contradictions_are_the_users_to_mend(change, words):
    environ = {key: value for key, value in {**SRUN, **change}.items() if value is not None}
    with pytest.raises(LaunchError) as caught:
        World.from_environment(environ)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_torchrun_variable_is_named(name):
    with pytest.raises(LaunchError, match=f"but not {name}") as caught:
        World.from_environment({key: value for key, value in TORCHRUN.items() if key != name})
    assert caught.value.exit_code == 2


def test_unequal_nodes_under_torchrun():
    with pytest.raises(LaunchError, match="WORLD_SIZE=5"):
        World.from_environment({**TORCHRUN, "WORLD_SIZE": "5"})


def test_node_lists():
    assert hosts("node[001-003,7],x") == ("node001", "node002", "node003", "node7", "x")
    assert hosts("a1,b[2-3]") == ("a1", "b2", "b3")
    assert hosts("rack[1-2]n[09-10],z") == (
        "rack1n09", "rack1n10", "rack2n09", "rack2n10", "z",
    )  # fmt: skip
    assert hosts("login.site.org") == ("login.site.org",)
    assert hosts("") == ()


def test_task_counts():
    assert equal_tasks("8(x16)") == equal_tasks("8,8(x2)") == equal_tasks("8") == 8


@given(st.integers(0, 2**40), st.integers(0, 2**31))
def test_ports_of_jobs_are_valid_and_not_the_systems_own(job, step):
    assert 1024 < job_port(str(job), str(step)) < 32768


def test_steps_of_one_job_use_different_ports():
    assert len({job_port("4711", str(step)) for step in range(50)}) == 50


def test_a_ranks_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert share(1, {}) == cores
    assert share(10 * cores, {}) == 1
    assert share(4, {"OMP_NUM_THREADS": "3"}) == 3
    assert share(4, {**SRUN, "SLURM_CPUS_PER_TASK": "7"}) == 7
    assert share(10 * cores, {"SLURM_CPUS_PER_TASK": "7"}) == 1  # a local launch in one task


def _world(rank, size, port):
    return World(rank, size, rank, size, "here", "slurm", "127.0.0.1", port, "job")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_taken_port_is_said_at_once():
    with listen("", 0) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(LaunchError, match=f"port {port} on .* is in use: set launch.port="):
            make_store(_world(0, 2, port), timedelta(seconds=60))
    assert time.monotonic() - started < 2


def test_waiting_for_rank_zero_ends_with_its_address():
    port = _free_port()
    with pytest.raises(LaunchError, match=rf"127.0.0.1:{port} within 1 s.*did rank 0 start"):
        make_store(_world(1, 2, port), timedelta(seconds=1))


def test_rank_zero_says_when_not_all_ranks_came():
    with pytest.raises(LaunchError, match=r"not all of 2 ranks came .* absent: rank 1"):
        make_store(_world(0, 2, _free_port()), timedelta(seconds=1))


def test_another_jobs_store_at_the_same_port_is_not_ours():
    server = listen("127.0.0.1", 0)
    port = server.getsockname()[1]
    ours = make_store(_world(0, 1, port), timedelta(seconds=5), server.detach())
    ours.set("key", "value")
    other = World(1, 2, 1, 2, "here", "slurm", "127.0.0.1", port, "other job")
    with pytest.raises(LaunchError, match="did rank 0 start"):
        make_store(other, timedelta(seconds=1))


def _limited(soft, hard, size):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        make_store(_world(0, size, _free_port()), timedelta(seconds=1))
    except LaunchError as error:
        return str(error), resource.getrlimit(resource.RLIMIT_NOFILE)


def test_rank_zero_may_open_a_file_for_each_connection_of_each_rank():
    (said, (soft, hard)) = run_ranks(lambda _: _limited(300, 800, 100), 1)[0]
    assert "not all of 100 ranks came" in said
    assert (soft, hard) == (756, 800)
    (said, (soft, _)) = run_ranks(lambda _: _limited(300, 600, 100), 1)[0]
    assert re.search(r"may open 600 files on .* and needs 756.* of 100 ranks", said)
    assert soft == 300


SUM = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from frontier_llm.parallel.world import World, init_process_group, make_store
world = World.from_environment(os.environ)
store = make_store(world, timedelta(seconds=20))
init_process_group(world, store, torch.device("cpu"), timedelta(seconds=20))
tensor = torch.tensor([world.rank + 1.0])
dist.all_reduce(tensor)
sys.stdout.write(f"{world.launcher} {world.rank}/{world.size} sum {tensor.item()}\\n")
dist.barrier()
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
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [
        "torchrun 0/2 sum 3.0",
        "torchrun 1/2 sum 3.0",
    ]


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
    said = sorted(task.communicate(timeout=60)[0] for task in tasks)
    assert said == ["slurm 0/2 sum 3.0\n", "slurm 1/2 sum 3.0\n"]


def test_one_rank_needs_no_peer():
    server = listen("127.0.0.1", 0)
    world = _world(0, 1, server.getsockname()[1])
    store = make_store(world, timedelta(seconds=5), server.detach())
    init_process_group(world, store, torch.device("cpu"), timedelta(seconds=5))
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
