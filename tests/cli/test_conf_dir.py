"""`--conf-dir DIR`: the user's own files are found, win, are listed, and reach child processes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.help import help_text
from frontier_llm.cli.main import main, take_conf_dir
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.errors import ConfigError
from tests.forked_train import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXPERIMENT = """\
# @package _global_
# An experiment of a user.
# ranks: 1
# run: frontier-llm train experiment=mine
defaults:
  - override /model: mine
  - override /cluster: mine
parallel: {pipeline: 1}
trainer: {steps: 2, evaluate_every_steps: null, evaluate_batches: 1, sample_tokens: 0}
data: {global_batch: 4, micro_batch: 1, sequence_length: 16}
launch: {ranks: 1}
telemetry: {wandb: "off"}
"""


@pytest.fixture
def conf_dir(tmp_path):
    """A configuration directory whose name needs quoting, given on the command line."""
    folder = tmp_path / "my conf"
    for group, name in (("model", "gpt_tiny"), ("cluster", "cpu_laptop")):
        (folder / group).mkdir(parents=True)
        values = yaml.safe_load((ROOT / f"conf/{group}/{name}.yaml").read_text())
        (folder / group / "mine.yaml").write_text(
            f"# A {group} of a user.\n" + yaml.safe_dump({**values, "name": "mine"})
        )
    (folder / "model" / "gpt_tiny.yaml").write_text(
        yaml.safe_dump({**_shipped("gpt_tiny"), "layers": 7})
    )
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", list(sys.argv)):
        assert take_conf_dir(["plan", "--conf-dir", str(folder), "x=1"]) == ["plan", "x=1"]
        yield folder


def _shipped(model):
    return yaml.safe_load((ROOT / f"conf/model/{model}.yaml").read_text())


def test_an_experiment_a_model_and_a_cluster_of_the_user_compose(conf_dir):
    values = compose(["experiment=mine"])
    assert (values["model"]["name"], values["cluster"]["name"]) == ("mine", "mine")
    assert values["trainer"]["steps"] == 2
    assert compose(["experiment=frontier_22b"])["model"]["name"] == "gpt_22b", "shipped files stay"


def test_a_file_without_a_name_is_named(conf_dir):
    file = conf_dir / "model" / "bare.yaml"
    file.write_text("layers: 2\nhidden: 64\n")
    with pytest.raises(ConfigError, match=r"(?s)at model.name.*bare.yaml does not set it"):
        compose(["model=bare"])


def test_a_users_file_wins_over_a_shipped_one(conf_dir):
    assert _shipped("gpt_tiny")["layers"] != 7
    assert compose([])["model"]["layers"] == 7
    assert compose(["model=gpt_tiny"])["model"]["layers"] == 7


def test_help_lists_the_users_files(conf_dir):
    assert {"mine", "gpt_tiny"} <= set(groups()["model"])
    text = help_text(["all"])
    for comment in ("A model of a user.", "A cluster of a user.", "An experiment of a user."):
        assert f"    {'mine':<20} {comment}" in text


def test_child_processes_inherit_it(conf_dir):
    printed = subprocess.run(
        [sys.executable, "-m", "frontier_llm", "train", "--cfg", "job", "experiment=mine"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert yaml.safe_load(printed)["model"]["name"] == "mine"


@pytest.mark.exhaustive
def test_a_sweep_uses_it(conf_dir, tmp_path):
    """The trial is refused, because 3 samples do not divide the batch: training would be slow."""
    arguments = ["experiment=mine", "data.micro_batch=3", f"hydra.sweep.dir={tmp_path}/sweep"]
    ended = run(lambda: main(["sweep", *arguments]))
    assert ended.code == 2, "no trial was possible"
    trial = (tmp_path / "sweep" / "0" / "trial.json").read_text()
    assert '"refused"' in trial
    assert "data.global_batch" in trial


def test_a_job_receives_it(conf_dir, capsys):
    assert main(["launch", "experiment=mine"]) == 0
    command = shlex.split(capsys.readouterr().out.partition("command")[2])
    assert f"--export=ALL,{CONF_DIR_VARIABLE}={conf_dir}" in command


def test_a_plan_is_saved_there_and_says_how_it_is_run(conf_dir, capsys):
    arguments = ["plan", "--this", "--save", "planned", "experiment=frontier_22b"]
    assert main(arguments) == 0
    text = (conf_dir / "experiment" / "planned.yaml").read_text()
    command = next(line for line in text.splitlines() if line.startswith("# run: "))
    words = ["frontier-llm", "train", f"--conf-dir={conf_dir}", "experiment=planned"]
    assert shlex.split(command)[-4:] == words
    assert compose(["experiment=planned"])["model"]["name"] == "gpt_22b"


@pytest.mark.parametrize("words", [["--conf-dir=/no/such"], ["--conf-dir"], ["--conf-dir="]])
def test_a_directory_that_does_not_exist_is_refused(words):
    with mock.patch.dict(os.environ), pytest.raises(ConfigError, match="--conf-dir"):
        take_conf_dir(words)


def test_an_inherited_directory_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(CONF_DIR_VARIABLE, "/no/such")
    with pytest.raises(ConfigError, match=CONF_DIR_VARIABLE):
        take_conf_dir(["plan"])


@pytest.mark.parametrize(
    "content",
    [
        "trainer:\n  steps: 2\n", "trainer:\n  stepz: 2\n", "defaults: [override /model: llama]\n",
        "defaults: [base]\nlaunch: {ranks: 2}\n",
    ],
)  # fmt: skip
def test_an_experiment_whose_keys_would_have_no_effect_is_refused(conf_dir, content):
    (conf_dir / "experiment" / "base.yaml").write_text("trainer: {steps: 3}\n")
    (conf_dir / "experiment" / "lost.yaml").write_text(content)
    with pytest.raises(ConfigError, match="@package _global_") as caught:
        compose(["experiment=lost"])
    assert caught.value.key == "experiment"


def test_an_experiment_gives_its_place_to_the_files_that_it_extends(conf_dir):
    (conf_dir / "experiment" / "base.yaml").write_text("trainer: {steps: 3}\n")
    (conf_dir / "experiment" / "top.yaml").write_text("# @package _global_\ndefaults: [base]\n")
    assert compose(["experiment=top"])["trainer"]["steps"] == 3
