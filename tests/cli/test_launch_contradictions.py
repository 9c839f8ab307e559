"""Options of `frontier-llm launch` that contradict the configuration, or have no value."""

import re
import shlex

import pytest

from frontier_lab.jobs.launch import main
from frontier_lab.jobs.launch_options import with_joined_values
from frontier_llm.errors import ConfigError

pytestmark = pytest.mark.slow

SLURM = "experiment=megatron_1_7b"
"""4 nodes with 8 ranks; 16 cores per rank."""
PBS = "experiment=datastates_7b"
"""2 nodes of Polaris."""


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ("-N 3", "launch.nodes=3"), ("-N3", "launch.nodes=3"), ("--nodes=3", "launch.nodes=3"),
        ("--nodes 3", "launch.nodes=3"), ("--node=3", "launch.nodes=3"), ("-N", "launch.nodes=N"),
        ("--nodes=2-3", "launch.nodes=N"), ("-n 8", "launch.nodes=N"),
        ("--ntasks=8", "launch.nodes=N"), ("-G4", "launch.nodes=N"), ("--gpus=4", "launch.nodes=N"),
        ("--ntasks-per-node=4", "cluster.ranks_per_node=4"),
        ("--gpus-per-node=a100:4", "cluster.ranks_per_node=4"),
        ("--gres=gpu:4", "cluster.ranks_per_node=4"), ("-c 2", "cluster.host.cores=N"),
        ("--cpus-per-task=2", "cluster.host.cores=N"), ("--array=1-4", "--chain=N"),
        ("-a 1-4", "--chain=N"), ("--chain=2 --array=1-4", "--chain=N"),
    ],
)  # fmt: skip
def test_options_of_sbatch_that_change_the_resources_name_the_setting(options, setting):
    with pytest.raises(ConfigError) as caught:
        main([*options.split(), SLURM])
    assert caught.value.todo == f"write {setting} instead"


@pytest.mark.parametrize(
    "options",
    ["-N4", "--nodes=4", "--gpus-per-node=a100:8", "--gres=nvme:1", "-c 16", "--nodelist=n[1-4]"],
)
def test_options_that_agree_or_are_of_another_kind_are_passed_on(capsys, options):
    assert main([*options.split(), SLURM]) == 0
    assert options.split()[0] in shlex.split(capsys.readouterr().out.partition("command")[2])


@pytest.mark.parametrize(
    ("options", "todo"),
    [("--tiem=1:00", "did you mean --time?"), ("--xyzzyq", "sbatch --help lists its options"),
     ("--time=1:00:00", None), ("--exclus", None), ("--mem=0 --gpu-bind=closest", None)],
)  # fmt: skip
def test_an_option_that_sbatch_may_not_know_is_mentioned(capsys, options, todo):
    assert main([*options.split(), SLURM]) == 0
    found = re.findall("warning.*: sbatch may not know (.*)", capsys.readouterr().out)
    assert found == ([f"{options.partition('=')[0]}; {todo}"] if todo else [])


def test_nodes_may_include_the_spare_ones(monkeypatch):
    monkeypatch.setenv("FRONTIER_LLM_SPARE_NODES", "1")
    assert main(["--no-kill", "--nodes=5", SLURM]) == 0
    with pytest.raises(ConfigError, match=re.escape("launch.nodes=6")):
        main(["--no-kill", "--nodes=6", SLURM])


@pytest.mark.parametrize(
    ("resource", "nodes"),
    [("select=4:system=polaris", "4"), ("walltime=1:00:00,select=4", "4"), ("nodes=12", "12"),
     ("place=pack", "N")],
)  # fmt: skip
@pytest.mark.parametrize("joined", [False, True])
def test_resources_of_pbs_that_change_the_nodes_are_refused(resource, nodes, joined):
    options = [f"-l{resource}"] if joined else ["-l", resource]
    with pytest.raises(ConfigError, match=re.escape(f"launch.nodes={nodes} sets")):
        main([*options, PBS])
    assert main(["-l", "select=2:system=polaris", "-lplace=scatter", PBS]) == 0


@pytest.mark.parametrize(
    ("words", "todo"),
    [(["--time="], "value"), (["--partition=", "-A", "P"], "value"), (["-A", ""], "value"),
     (["--"], "value"), (["--time"], "06:00:00"), (["-t"], "06:00:00"),
     (["--time", "-A", "P"], "06:00:00"), (["-A"], "-A VALUE"), (["--partition"], "VALUE")],
    ids=str,
)  # fmt: skip
def test_an_option_without_its_value_is_refused(words, todo):
    with pytest.raises(ConfigError, match=todo):
        main([*words, SLURM])


def test_a_time_of_pbs_without_a_value_is_refused():
    with pytest.raises(ConfigError, match="hours:minutes:seconds"):
        main(["-l", "walltime=", PBS])


def test_a_value_with_an_equals_sign_stays_with_its_option():
    words = ["-J", "my=name", "--comment", "a=b", "-A", "P", "--hold", "typo.key=1", "-x", "a=b=c"]
    wanted = ["-Jmy=name", "--comment=a=b", "-A", "P", "--hold", "typo.key=1", "-xa=b=c"]
    assert with_joined_values([*words, SLURM]) == [*wanted, SLURM]
    assert with_joined_values(["--unknown", "trainer.steps=3"]) == ["--unknown", "trainer.steps=3"]
    assert main(["-J", "my=name", "--comment", "a=b", SLURM]) == 0


def test_jobs_that_save_nothing_must_do_all_steps():
    job = ["experiment=frontier_22b", "checkpoint=off"]
    with pytest.raises(ConfigError, match="each job resumes"):
        main(["--chain=2", "--time=30", *job])
    with pytest.raises(ConfigError, match=r"100 steps \(checkpoint=off\)") as caught:
        main(["--time=02:00:00", *job])
    assert main([caught.value.todo.split()[-1], *job]) == 0


def test_jobs_of_a_curve_have_no_common_run_directory():
    with pytest.raises(ConfigError, match="own folder below runs"):
        main(["--scaling=strong", "planner.nodes=[1,2]", "run.dir=X", SLURM])
