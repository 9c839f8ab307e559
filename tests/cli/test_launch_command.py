"""The job that an experiment asks Slurm for."""

import re
import shlex
from pathlib import Path

import pytest

from frontier_lab.jobs.launch import main
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import Header, composed
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
    _, command = _shown(capsys, "-A", "PROJECT", "--mem=0", "--chain=3", "experiment=megatron_1_7b")
    assert command[5:9] == ["--array=1-3%1", "-A", "PROJECT", "--mem=0"]
    assert command[9] == "scripts/a100.sbatch"


@pytest.mark.parametrize(
    ("cluster", "script"),
    [("lumi_mi250x", "lumi.sbatch"), ("h100_8", "a100.sbatch")],
)
def test_a_site_has_its_own_script(cluster, script, capsys):
    _, command = _shown(capsys, f"cluster={cluster}", "launch.nodes=1", "plan=off")
    assert f"scripts/{script}" in command


def test_amd_gpus_do_not_get_the_script_for_cuda():
    with pytest.raises(ConfigError, match=r"copy frontier\.sbatch.* to mi300x\.sbatch"):
        main(["cluster=mi300x_8", "launch.nodes=1", "plan=off"])


def test_a_site_with_pbs_is_asked_through_qsub(capsys):
    _, command = _shown(capsys, "-A", "PROJECT", "-lwalltime=00:30:00", "experiment=datastates_7b")
    assert command == [
        "qsub", "-lselect=2:system=polaris", "-lplace=scatter", "-A", "PROJECT",
        "-lwalltime=00:30:00", "--", f"{ROOT}/scripts/polaris.pbs", "experiment=datastates_7b",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="PBS"):
        main(["--chain=2", "experiment=datastates_7b"])


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (["--time=00:20:00"], "-l walltime=00:20:00;"),
        (["-t", "00:20:00"], "-l walltime=00:20:00;"),
        (["-p", "debug"], "-q debug;"),
        (["-pdebug"], "-q debug;"),
        (["-N2"], "launch.nodes=2;"),
        (["--exclusive"], "-l filesystems=home:eagle"),
    ],
    ids=str,
)
def test_options_of_slurm_are_refused_for_pbs(options, instead):
    with pytest.raises(ConfigError, match=re.escape(instead)):
        main(["-A", "PROJECT", *options, "experiment=datastates_7b"])


def test_options_of_qsub_may_have_their_value_in_another_word(capsys):
    options = ["-l", "walltime=00:20:00", "-q", "debug", "-N", "name", "-p", "-5"]
    _, command = _shown(capsys, *options, "experiment=datastates_7b")
    words = ["-lwalltime=00:20:00", *options[2:], "--"]
    assert command[3 : 3 + len(words)] == words


def test_the_full_command_for_polaris_is_that_of_the_documentation(capsys):
    page = (ROOT / "docs/running-on-a-site.md").read_text().replace("\\\n", " ")
    text = re.search(r"frontier-llm launch (.* experiment=datastates\S+.*)", page)[1]
    _, command = _shown(capsys, *shlex.split(text))
    script = (ROOT / "scripts/polaris.pbs").read_text().replace(" \\\n#  ", "")
    shown = shlex.split(re.search(r"#   qsub (.*)", script)[1].replace("$PWD", str(ROOT)))
    assert command[1:] == shown


@pytest.mark.parametrize("cluster", [[], ["cluster=auto"], ["cluster=cpu_laptop"]])
def test_a_job_on_cpus_must_be_asked_for_by_name(capsys, cluster):
    if cluster == ["cluster=cpu_laptop"]:
        assert main(cluster) == 0
    else:
        with pytest.raises(ConfigError, match="add cluster=NAME: a100_40g_8, a100_80g"):
            main(cluster)


def test_an_option_that_sbatch_may_lack_is_warned_of_and_passed_on(capsys):
    known = ["--mem=3", "--exclus", "--gpus-per-task=1", "-q", "debug", "--time", "1:00:00"]
    unknown = ["--tiem=2:00:00", "--foo", "--partitoin=x"]
    said, command = _shown(capsys, *known, *unknown, "experiment=megatron_1_7b")
    assert [line for line in said.splitlines() if "may not know" in line] == [
        "warning    --tiem=2:00:00: sbatch may not know --tiem; did you mean --time?",
        "warning    --foo: sbatch may not know --foo; sbatch --help lists its options",
        "warning    --partitoin=x: sbatch may not know --partitoin; did you mean --partition?",
    ]
    assert set(unknown) < set(command)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("--sumbit", "did you mean --submit"),
        ("-submit", "did you mean --submit"),
        ("--chian=3", "did you mean --chain"),
        ("--scale=weak", "did you mean --scaling"),
        ("--dry-run", "the command is printed, and --submit also submits it"),
    ],
)
def test_a_mistyped_option_does_not_reach_sbatch(option, wanted):
    with pytest.raises(ConfigError, match=wanted):
        main([option, "experiment=megatron_1_7b"])


def test_options_of_sbatch_that_resemble_ours_are_passed_on(capsys):
    options = ["--chdir=/tmp", "--signal=USR1@60", "--hold", "--mail-type=ALL", "--comment=x"]
    assert main([*options, "experiment=megatron_1_7b"]) == 0
    out, err = capsys.readouterr()
    assert " ".join(options) in out
    assert "--submit also submits" in err


def test_cpu_nodes_ask_for_no_devices(capsys):
    said, command = _shown(capsys, "cluster=cpu_laptop", "launch.nodes=2")
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
        main(["--submit", "cluster=cpu_laptop"])


def test_submitting_runs_the_command_that_was_shown(capsys, monkeypatch, tmp_path):
    stub = tmp_path / "sbatch"
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\npwd >> {tmp_path}/asked\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _, command = _shown(capsys, "--submit", "cluster=cpu_laptop", "trainer.steps=7")
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
