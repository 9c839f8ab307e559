"""The rank, size and node of a process, from the variables of srun and torchrun."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.errors import LaunchError
from frontier_llm.launch import slurm
from frontier_llm.launch.cores import share
from frontier_llm.launch.slurm import equal_tasks, hosts, job_port, read_task
from frontier_llm.launch.world import World

ROOT = Path(__file__).parents[2]
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
    assert not slurm.started_again({"SLURM_RESTART_COUNT": "1"})  # a shell in the job


def test_equal_ranks_in_both_environments_are_accepted():
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
def test_contradictions_in_sruns_variables_are_errors(change, words):
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


@pytest.mark.parametrize(
    ("launcher", "change"),
    [
        (TORCHRUN, {"RANK": "abc"}),
        (TORCHRUN, {"RANK": "4"}),
        (TORCHRUN, {"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0"}),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0"}),
        (TORCHRUN, {"LOCAL_RANK": "-1"}),
        (TORCHRUN, {"MASTER_PORT": ""}),
        (SRUN, {"MASTER_PORT": "port"}),
        (SRUN, {"SLURM_NTASKS": ""}),
    ],
)
def test_a_variable_that_is_no_valid_number_is_named(launcher, change):
    name, value = next(iter(change.items()))
    with pytest.raises(
        LaunchError, match=f"^{name}='?{value}'? is not a whole number from [01] to "
    ) as caught:
        World.from_environment({**launcher, **change})
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


def test_strangers_cannot_compute_port_and_keys_of_a_job_with_a_secret():
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}  # fmt: skip
    tasks = [read_task({**task, "FRONTIER_LLM_SECRET": secret}) for secret in ("", "a", "b", "a")]
    assert tasks[1] == tasks[3]
    assert len({(t.master_port, t.job) for t in tasks}) == len({t.master_port for t in tasks}) == 3
    assert (tasks[0].master_port, tasks[0].job) == (job_port("4711", "0"), "4711.0")
    assert all(1024 < job_port("1", "0", str(n)) < 32768 for n in range(100))


def test_job_scripts_draw_a_secret_that_tasks_inherit():
    script = ROOT / "scripts" / "common_env.sh"
    show = f'USER=u source {script} && echo "$FRONTIER_LLM_SECRET"'
    drawn = [
        subprocess.run(["bash", "-c", show], env=env, capture_output=True, text=True).stdout.strip()
        for env in ({}, {}, {"FRONTIER_LLM_SECRET": "inherited"})
    ]
    assert all(re.fullmatch("[0-9a-f]{32}", text) for text in drawn[:2])
    assert drawn[0] != drawn[1]
    assert drawn[2] == "inherited"


def test_steps_of_one_job_use_different_ports():
    assert len({job_port("4711", str(step)) for step in range(50)}) == 50


def test_a_ranks_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert share(1, {}) == cores
    assert share(10 * cores, {}) == 1
    assert share(4, {"OMP_NUM_THREADS": "3"}) == 3
    assert share(1, {"OMP_NUM_THREADS": "²"}) == cores
    assert share(4, {**SRUN, "SLURM_CPUS_PER_TASK": "7"}) == 7
    assert share(10 * cores, {"SLURM_CPUS_PER_TASK": "7"}) == 1  # a local launch in one task
