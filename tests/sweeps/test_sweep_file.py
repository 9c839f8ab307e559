"""Files of `conf/sweep`: a whole search in a file. A wrong file is refused before any trial."""

import sys
from pathlib import Path

import pytest

from frontier_lab.sweeps import sweep as sweeps
from frontier_lab.sweeps.sweep import file_settings, first_configuration, plugin_defaults
from frontier_lab.sweeps.sweep_trials import axes, read_in_order
from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.main import main
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.errors import ConfigError
from tests.forked_train import run

ROOT = Path(__file__).parents[2]
HEAD = "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a file of a group in the user's configuration directory."""
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))

    def write(name, text, group="sweep"):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / f"{name}.yaml").write_text(text)

    return write


@pytest.mark.parametrize("name", groups()["sweep"])
def test_every_file_is_a_search_whose_first_trial_is_a_configuration(name):
    settings = file_settings([f"sweep={name}"])
    assert "hydra/sweeper=optuna" in settings
    assert sum("choice(" in text for text in settings) >= 2
    config = first_configuration([*settings, f"sweep={name}"])
    assert config.launch.trial_value == "speed_per_device"
    assert "hydra.sweeper.direction=maximize" in plugin_defaults(config, settings)


def test_the_study_has_the_axes_of_the_paper_and_the_accumulation():
    keys = {text.partition("=")[0] for text in file_settings(["sweep=frontier_175b"])}
    assert {
        "launch.nodes", "parallel.tensor", "parallel.pipeline", "data.micro_batch",
        "launch.trial_micro_batches", "sharding",
    } <= keys  # fmt: skip
    assert first_configuration(["sweep=frontier_175b"]).model.name == "gpt_175b"


def test_the_command_line_replaces_axes_plugins_and_the_experiment():
    given = ["sweep=frontier_175b", "parallel.tensor=4", "hydra.sweeper.n_trials=7"]
    settings = file_settings([*given, "hydra/sweeper/sampler=random"])
    replaced = ("parallel.tensor", "hydra.sweeper.n_trials", "hydra/sweeper/sampler")
    assert not [text for text in settings if text.startswith(replaced)]
    assert compose(["sweep=frontier_175b", "experiment=frontier_22b"])["model"]["name"] == "gpt_22b"


def test_defaults_of_plugins_do_not_replace_settings_of_the_file(own):
    own("mine", HEAD + "hydra: {sweeper: {n_jobs: 3}, launcher: {nodes: 5}}\n")
    settings = [*file_settings(["sweep=mine"]), "hydra/launcher=submitit_slurm"]
    defaults = plugin_defaults(first_configuration([]), settings)
    keys = {text.partition("=")[0] for text in defaults}
    assert "hydra.launcher.tasks_per_node" in keys
    assert not keys & {"hydra.sweeper.n_jobs", "hydra.launcher.nodes"}
    usual = plugin_defaults(first_configuration([]), ["hydra/sweeper=optuna"])
    assert "hydra.sweeper.n_jobs=1" in usual


def test_a_file_extends_another(own):
    own("base", HEAD + "hydra: {sweeper: {params: {model.layers: 'choice(2,4)'}}}\n")
    own("mine", "# @package _global_\ndefaults: [base]\ntrainer: {steps: 5}\n")
    assert file_settings(["sweep=mine"]) == ["hydra/sweeper=optuna", "model.layers=choice(2,4)"]
    assert first_configuration(["sweep=mine"]).trainer.steps == 5


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("hydra: {sweeper: {params: {parallel.tensr: 'choice(1,2)'}}}", "parallel.tensr", "tensor"),
        ("launch: {trial_valu: speed}", "launch.trial_valu", "trial_value"),
        ("hydra: {sweeper: {n_trails: 3}}", "sweep", "n_trails"),
    ],
)
def test_a_mistake_in_a_file_is_named(own, text, key, part):
    own("mine", HEAD + text + "\n")
    with pytest.raises(ConfigError, match=part) as caught:
        sweeps.main(["sweep=mine"])
    assert caught.value.key == key


def test_a_misspelt_name_is_refused():
    with pytest.raises(ConfigError, match="did you mean sweep=frontier_175b") as caught:
        sweeps.main(["sweep=frontier_175", "launch.trial_runner=plan"])
    assert caught.value.key == "sweep"


def test_a_file_needs_its_plugin(monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_optuna_sweeper", None)
    with pytest.raises(ConfigError, match=r"/python\S* -m pip install 'frontier-llm\[sweep\]'"):
        sweeps.main(["sweep=frontier_175b"])


def test_a_choice_that_the_experiment_of_the_file_would_override_is_refused(own):
    own("mine", "# @package _global_\noptimizer: {learning_rate: 5.0e-4}\n", group="experiment")
    own("mine", HEAD + "  - override /experiment: mine\n")
    with pytest.raises(ConfigError, match="experiment=mine overrides"):
        compose(["sweep=mine", "optimizer=adamw_tiny"])
    assert compose(["sweep=mine"])["optimizer"]["learning_rate"] == 5e-4


@pytest.mark.slow
def test_a_search_runs_from_any_folder_with_a_file_of_the_user(own, tmp_path, monkeypatch):
    own(
        "mine",
        HEAD + "  - override /hydra/sweeper/sampler: bayesian\n"
        "  - override /experiment: frontier_22b\n"
        "hydra: {sweeper: {n_trials: 8, sampler: {seed: 1}, params: {"
        "launch.nodes: 'choice(2,4)', data.micro_batch: 'choice(1,64)'}}}\n"
        "launch: {trial_value: speed_per_device, trial_micro_batches: 8}\n",
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep=mine", "launch.trial_runner=plan", f"hydra.sweep.dir={tmp_path}/found"]
    ended = run(lambda: main(["sweep", *arguments]))
    assert ended.code == 0, ended.text
    trials = read_in_order(tmp_path / "found")
    assert len(trials) == 8
    assert set(axes(trials)) == {"launch.nodes", "data.micro_batch"}
    by_size = {trial.overrides[1]: trial.status for trial in trials}
    assert by_size == {"data.micro_batch=1": "done", "data.micro_batch=64": "refused"}
    for trial in trials:
        nodes = int(trial.overrides[0].removeprefix("launch.nodes="))
        assert (trial.ranks, trial.goal) == (
            8 * nodes if trial.status == "done" else None,
            "speed_per_device",
        )
        assert trial.value == (trial.tokens_per_second / trial.ranks if trial.ranks else 0)
    assert "7 of 8" in ended.text


@pytest.mark.parametrize("command", ["train", "plan", "dry-run", "launch"])
def test_a_command_without_a_search_refuses_a_search(command, capsys):
    assert main([command, "sweep=frontier_175b", "plan=dry_run"]) == 2
    shown = capsys.readouterr().err
    assert "run frontier-llm sweep sweep=frontier_175b" in shown
    assert "Traceback" not in shown
