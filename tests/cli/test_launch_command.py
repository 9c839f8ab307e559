"""The job that an experiment asks Slurm for."""

import re
import shlex
from pathlib import Path

import pytest

from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import Header, composed
from frontier_llm.cli.launch import main
from frontier_llm.cli.package_files import CONF
from frontier_llm.errors import ConfigError, LaunchError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.sbatch"))


def _shown(capsys, *arguments):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    return out, shlex.split(out.partition("command")[2].strip())


def test_resources_follow_from_the_experiment(capsys):
    said, command = _shown(capsys, "experiment=frontier_175b", "checkpoint.every_steps=10")
    assert "128 nodes, 1024 ranks (8 per node), 1024 devices, 7168 cores (7 per rank)" in said
    assert command == [
        "sbatch", "--nodes=128", "--ntasks-per-node=8", "--cpus-per-task=7", "--gpus-per-node=8",
        "scripts/frontier.sbatch", "experiment=frontier_175b", "checkpoint.every_steps=10",
    ]  # fmt: skip


def test_other_options_go_to_sbatch_and_come_last(capsys):
    _, command = _shown(
        capsys, "-A", "PROJECT", "--nodes=64", "--chain=3", "experiment=megatron_1_7b"
    )
    assert command[5:9] == ["--array=1-3%1", "-A", "PROJECT", "--nodes=64"]
    assert command[9] == "scripts/a100.sbatch"


@pytest.mark.parametrize(
    ("cluster", "script"),
    [("lumi_mi250x", "lumi.sbatch"), ("mi300x_8", "a100.sbatch"), ("h100_8", "a100.sbatch")],
)
def test_a_site_has_its_own_script(cluster, script, capsys):
    _, command = _shown(capsys, f"cluster={cluster}", "launch.nodes=1", "plan=off")
    assert f"scripts/{script}" in command


def test_a_site_with_pbs_is_asked_through_qsub(capsys):
    _, command = _shown(capsys, "-A", "PROJECT", "-lwalltime=00:30:00", "experiment=datastates_7b")
    assert command == [
        "qsub", "-lselect=2:system=polaris", "-lplace=scatter", "-A", "PROJECT",
        "-lwalltime=00:30:00", "--", f"{ROOT}/scripts/polaris.pbs", "experiment=datastates_7b",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="PBS"):
        main(["--chain=2", "experiment=datastates_7b"])


def test_cpu_nodes_ask_for_no_devices(capsys):
    said, command = _shown(capsys, "launch.nodes=2")
    assert "no devices" in said
    assert "--gpus-per-node=0" in command


@pytest.mark.parametrize("name", groups()["experiment"])
def test_an_experiments_nodes_hold_its_ranks(name):
    config = composed(f"experiment={name}")
    nodes = config.launch.nodes or -(-config.launch.ranks // config.cluster.ranks_per_node)
    assert (
        nodes * config.cluster.ranks_per_node
        >= Header.read(CONF / "experiment" / f"{name}.yaml").ranks
    )


def test_what_every_rank_would_refuse_is_refused_before_it_is_submitted():
    with pytest.raises(ConfigError, match=r"parallel.tensor x parallel.pipeline"):
        main(["experiment=frontier_175b", "launch.nodes=3"])


def test_an_elastic_run_is_fitted_to_the_nodes_as_it_will_be(capsys):
    arguments = ["experiment=frontier_1_4b", "launch.nodes=20", "data.global_batch=400"]
    with pytest.raises(ConfigError, match=r"data\.global_batch"):
        main(arguments)
    capsys.readouterr()
    assert main([*arguments, "launch.elastic=true"]) == 0
    assert re.search(r"elastic +data.micro_batch: 10 -> 5", capsys.readouterr().err)


@pytest.mark.parametrize("chain", [["--chain=many"], ["--chain=0"], ["--chain", "8"], ["--chain"]])
def test_a_chain_is_a_number(chain):
    with pytest.raises(ConfigError, match="--chain=8"):
        main(chain)


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment"],
        ["experiment=frontier_22b", "trainer.steps"],
        ["--submit", "experiment"],
        ["-N2", "experiment"],
        ["--nodes=2", "experiment"],
        ["-A", "PROJECT", "experiment"],
    ],
    ids=" ".join,
)
def test_a_word_that_slurm_would_take_for_the_script_is_refused(arguments):
    with pytest.raises(ConfigError, match=arguments[-1]):
        main(arguments)


def test_submitting_needs_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="login node"):
        main(["--submit"])


def test_submitting_runs_the_command_that_was_shown(capsys, monkeypatch, tmp_path):
    stub = tmp_path / "sbatch"
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\npwd >> {tmp_path}/asked\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _, command = _shown(capsys, "--submit", "trainer.steps=7")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert shlex.split(asked[0]) == command[1:]
    assert Path(asked[1]) == ROOT


# The scripts themselves


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_hands_its_arguments_on_and_stops_at_the_first_error(script):
    text = script.read_text()
    assert '"$@"' in text
    assert "set -euo pipefail" in text
    assert not re.search(r"^\s*(if|for|while|case)\b", text, re.MULTILINE), "no logic here"


@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_an_image_pins_what_it_builds_and_runs_as_nobody_special(name):
    text = (ROOT / f"Dockerfile.{name}").read_text()
    assert re.search(r"^ARG APEX_COMMIT=[0-9a-f]{40}$", text, re.MULTILINE)
    assert re.search(r"^ARG BASE=\S+:\S+$", text, re.MULTILINE)
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10001"]
