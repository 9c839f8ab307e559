"""`train.py -m`: many trials, of which some fail, and none ends the others."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_lab.sweeps import sweep as sweeps
from frontier_lab.sweeps import trial_runner as runner
from frontier_lab.sweeps.sweep import first_configuration, plugin_defaults
from frontier_lab.sweeps.sweep_trials import ONLY_CHANCE, Trial
from frontier_lab.sweeps.trial_runner import (
    derived_overrides,
    finished_trial,
    planned_trial,
    repeated_trial,
    run_trial,
)
from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import estimate
from frontier_llm.telemetry.jsonl import JsonlSink
from tests.forked_train import train
from tests.patience import patient
from tests.telemetry.runs import step_metrics
from tests.texts import prose

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = (
    "data=text", "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocabulary=300",
    "data.vocabulary=300", "data.sequence_length=16", "data.global_batch=4", "precision=fp32",
    "parallel.pipeline=1", "trainer.steps=4", "trainer.evaluate_batches=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(40))
    return [f"data.path={folder}/text.txt", f"data.directory={folder}/prepared"]


@pytest.mark.exhaustive
def test_a_grid_runs_every_trial_and_a_refused_one_is_a_value(corpus, tmp_path):
    def run_sweep(axis):
        return train("-m", *SMALL, *corpus, "launch.ranks=1", axis, f"hydra.sweep.dir={tmp_path}")

    ended = run_sweep("data.micro_batch=2,8")
    assert ended.code == 0, ended.text
    trials = [json.loads((tmp_path / f"{n}/trial.json").read_text()) for n in range(2)]
    assert [trial["status"] for trial in trials] == ["done", "refused"]
    assert "data.global_batch" in trials[1]["reason"]
    assert trials[0]["tokens_per_second"] > 0
    assert trials[0]["peak_bytes"] > 0
    assert trials[1]["tokens_per_second"] == 0
    assert not (tmp_path / "1/run").exists(), "a refused trial starts nothing"
    metrics = tmp_path / "0/run/metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == 4

    written = metrics.stat().st_mtime_ns
    assert run_sweep("data.micro_batch=2,8").code == 0
    assert metrics.stat().st_mtime_ns == written, "what is done is kept"
    other = run_sweep("data.micro_batch=4,8")
    assert other.code == 2
    assert "hydra.sweep.dir" in other.text
    assert "Traceback" not in other.text
    assert metrics.exists()


def test_the_planner_predicts_trials_of_a_cluster_that_is_not_here(tmp_path):
    overrides = ["experiment=frontier_22b", "planner.nodes=2", "launch.trial_runner=plan"]
    command = [
        sys.executable, "train.py", "-m", *overrides, "parallel.pipeline=2,8",
        f"hydra.sweep.dir={tmp_path}",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(100))
    assert ended.returncode == 0, ended.stderr
    trials = [Trial.read(tmp_path / str(number)) for number in range(2)]
    assert [trial.status for trial in trials] == ["refused", "done"]
    assert "memory" in trials[0].reason
    planned = estimate(Candidate.of(decode(compose([*overrides, "parallel.pipeline=8"])), 16, 8))
    assert trials[1].tokens_per_second == planned.tokens_per_second
    assert trials[1].peak_bytes == planned.peak.total
    assert not (tmp_path / "1/run").exists()
    assert re.search(r"^0 .*\n +refused: got: memory", ended.stdout, re.MULTILINE), ended.stdout
    assert ended.stdout.endswith(f"frontier-llm sweep-report {tmp_path}\n")


@pytest.mark.exhaustive
def test_a_sweep_without_a_trial_that_can_run_fails(tmp_path):
    command = [
        sys.executable, "train.py", "-m", "experiment=frontier_22b", "planner.nodes=2",
        "launch.trial_runner=plan", "parallel.pipeline=2", f"hydra.sweep.dir={tmp_path}",
        "optimizer.learning_rate=1e-4,2e-4",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(100))
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.startswith(ONLY_CHANCE), "learning rates have no influence on the speed"


@pytest.mark.parametrize(
    ("argument", "key"),
    [("hydra.sweep.dir=/proc/none/s", "hydra.sweep.dir"), ("--cfg=job", "the command line")],
)
def test_what_a_sweep_cannot_do_is_refused_before_it_starts(argument, key):
    with pytest.raises(ConfigError, match=f"configuration error at {key}"):
        sweeps.main(["trainer.steps=1,2", argument])


def test_a_default_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    for settings in (["trainer.steps=1,2"], ["sweep=frontier_175b", "launch.trial_runner=plan"]):
        with pytest.raises(ConfigError, match=r"at hydra\.sweep\.dir") as caught:
            sweeps.main(settings)
        assert caught.value.todo.startswith("choose another hydra.sweep.dir")


def test_a_trial_that_cannot_be_resolved_is_refused():
    trial = planned_trial(["data.micro_batch=3", "data.global_batch=8"])
    assert trial.status == "refused"
    assert "data.global_batch" in trial.reason


def test_a_batch_follows_from_the_micro_batches_of_a_replica():
    overrides = [
        "experiment=frontier_22b", "launch.nodes=4", "data.micro_batch=2", "parallel.tensor=2",
        "sharding=zero1",
    ]  # fmt: skip
    trial = planned_trial([*overrides, "launch.trial_micro_batches=16"])
    replicas = 4 * 8 // (2 * 8)
    same = planned_trial([*overrides, f"data.global_batch={16 * 2 * replicas}"])
    assert trial.status == same.status == "done"
    assert trial.tokens_per_second == same.tokens_per_second
    assert trial.tokens_per_second != planned_trial(overrides).tokens_per_second
    assert (trial.ranks, trial.goal) == (32, "speed")


def _derived(*overrides):
    return derived_overrides(overrides, compose(overrides)["launch"])


def test_a_run_receives_the_processes_and_the_batch_of_its_trial(monkeypatch):
    base = ("launch.ranks_per_node=3", "parallel.pipeline=1", "data.micro_batch=2")
    batch = "launch.trial_micro_batches=5"
    assert _derived(*base) == []
    assert _derived(*base, batch) == ["data.global_batch=40"]  # launch.ranks is 4
    assert _derived(*base, batch, "launch.nodes=2") == [
        "launch.ranks=6", "launch.ranks_per_node=3", "data.global_batch=60",
    ]  # fmt: skip
    on_slurm = {
        "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "a[1-2]",
    }  # fmt: skip
    for name, value in on_slurm.items():
        monkeypatch.setenv(name, value)
    assert _derived(*base, batch, "launch.nodes=2") == ["data.global_batch=80"]


def test_what_the_ranks_cannot_share_is_left_to_the_rules():
    overrides = ["parallel.tensor=3", "parallel.pipeline=1", "launch.trial_micro_batches=5"]
    assert _derived(*overrides) == ["data.global_batch=16"]
    trial = planned_trial(overrides)
    assert (trial.status, trial.ranks, trial.value) == ("refused", None, 0.0)


def test_the_planner_predicts_no_loss():
    with pytest.raises(ConfigError, match="does not predict losses"):
        sweeps.main(["launch.trial_runner=plan", "launch.trial_value=loss"])


def test_a_batch_and_the_micro_batches_that_it_follows_from_are_refused():
    with pytest.raises(ConfigError, match=r"follows from launch\.trial_micro_batches") as caught:
        sweeps.main(["data.global_batch=8,16", "launch.trial_micro_batches=5"])
    assert caught.value.key == "data.global_batch"


def test_a_trial_that_takes_too_long_is_ended(corpus, tmp_path):
    """Its steps would take hours."""
    trial = run_trial([*SMALL, *corpus, "trainer.steps=10000000", "launch.ranks=1"], tmp_path, 1.0)
    assert trial.status == "too slow"
    assert trial.outcome.endswith("(launch.trial_minutes)")


def test_the_limit_of_a_slow_trial_is_read_after_much_output(tmp_path, monkeypatch):
    run = runner._run
    talks = "import sys, time; print('word ' * 1000, file=sys.stderr); time.sleep(60)"
    program = [sys.executable, "-u", "-c", talks]
    monkeypatch.setattr(runner, "_run", lambda _, seconds: run(program, seconds))
    seconds = patient(0.5)
    trial = run_trial([], tmp_path, seconds)
    ended = f"ended after {seconds / 60:g} minutes (launch.trial_minutes)"
    assert trial.outcome == f"too slow: {ended}"
    assert "word word" in trial.reason


@pytest.mark.parametrize(("task", "goes"), [("0", True), ("1", False)])
def test_what_an_earlier_try_left_is_removed_once(tmp_path, monkeypatch, task, goes):
    left = tmp_path / "run" / "metrics.jsonl"
    left.parent.mkdir()
    left.touch()
    monkeypatch.setenv("SLURM_PROCID", task)
    seen = []
    monkeypatch.setattr(runner, "_run", lambda *_: seen.append(left.exists()) or (2, "refused"))
    assert run_trial([], tmp_path, 1.0).status == "refused"
    assert seen == [not goes]


def test_a_sweep_that_runs_again_keeps_what_is_done(tmp_path):
    done = Trial(["a=1"], "done", "", 1.0, 1.0, None, 1.0, 1.0)
    failed = Trial(["a=2"], "failed", "no", 1.0, 0.0, None, None, None)
    for number, one in enumerate((done, failed)):
        (tmp_path / str(number)).mkdir()
        one.write(tmp_path / str(number))
    assert finished_trial(["a=1"], tmp_path / "0") == done
    assert finished_trial(["a=2"], tmp_path / "1") is None
    assert finished_trial(["a=3"], tmp_path / "2") is None
    with pytest.raises(ConfigError, match="whose trial 1 has a=2"):
        finished_trial(["b=1"], tmp_path / "1")


def test_a_repeated_setting_is_answered_from_the_earlier_trial(tmp_path):
    done = Trial(["a=1", "b=2"], "done", "", 1.0, 1.0, None, 1.0, 1.0)
    failed = Trial(["a=2", "b=2"], "failed", "no", 1.0, 0.0, None, None, None)
    for number, one in enumerate((done, failed)):
        (tmp_path / str(number)).mkdir()
        one.write(tmp_path / str(number))
    assert repeated_trial(["b=2", "a=1"], tmp_path / "2") == done
    assert repeated_trial(["b=2", "a=2"], tmp_path / "2") is None
    assert repeated_trial(["b=3", "a=1"], tmp_path / "2") is None


@pytest.mark.exhaustive
def test_a_search_prints_its_axes_and_nothing_of_its_libraries(tmp_path):
    command = [
        sys.executable, "-m", "frontier_llm", "sweep", "sweep=frontier_175b",
        "launch.trial_runner=plan", "hydra.sweeper.n_trials=2", f"hydra.sweep.dir={tmp_path}",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(100))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    lines = [line for line in ended.stdout.splitlines() if "refused: " not in line]
    first, second, *best, end = lines
    assert end.endswith(f"sweep-report {tmp_path}")
    for line in (first, second):
        assert "parallel.tensor=" in line
        assert "launch.trial_runner" not in line
        assert "sweep=" not in line
    assert [line.split()[0] for line in best] == ["Best", "Best"]


def test_a_trial_is_what_its_last_step_and_its_usual_speed_are(tmp_path, monkeypatch):
    def train(*_):
        (tmp_path / "run").mkdir()
        sink = JsonlSink(tmp_path / "run")
        for step, speed in enumerate((1.0, 2.0, 30.0, 50.0, 40.0), start=1):
            sink.write(step_metrics(step, loss=9.0 - step, tokens_per_second=speed))
        sink.write(step_metrics(6, loss=2.0, tokens_per_second=45.0, validation_loss=2.5))
        sink.close()
        (tmp_path / "run" / "summary.json").write_text('{"ranks": [{"peak_bytes": 7}]}')
        return 0, ""

    monkeypatch.setattr(runner, "_run", train)
    trial = run_trial(["a=1"], tmp_path, 1.0)
    assert (trial.loss, trial.validation_loss, trial.peak_bytes) == (2.0, 2.5, 7)
    assert trial.tokens_per_second == 42.5


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["parallel.tensr=1,2"], "parallel.tensr"),
        (["data.micro_batch=many,few"], "data.micro_batch"),
        (["model=gpt_tny,gpt_tiny"], "model"),
        (["data.micro_batch=1,2", "run.dir=runs/a"], "run.dir"),
    ],
)
def test_what_is_wrong_in_every_trial_is_refused_at_once(arguments, key):
    with pytest.raises(ConfigError) as caught:
        sweeps.main(["-m", *arguments])
    assert caught.value.key == key


def test_an_absent_plugin_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_optuna_sweeper", None)
    with pytest.raises(ConfigError, match=r"/python\S* -m pip install 'frontier-llm\[sweep\]'"):
        sweeps.main(["-m", "hydra/sweeper=optuna", "trainer.steps=1,2"])


def test_a_trials_job_is_the_experiments():
    config = first_configuration(
        ["experiment=frontier_22b", "data.micro_batch=1,2", "hydra.job.name=x"]
    )
    assert config.data.micro_batch == 1
    told = plugin_defaults(config, ["hydra/launcher=submitit_slurm", "hydra/sweeper=optuna"])
    assert told[:4] == [
        "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=8",
        "hydra.launcher.cpus_per_task=7", "hydra.launcher.gpus_per_node=8",
    ]  # fmt: skip
    assert "hydra.sweeper.direction=maximize" in told
    assert plugin_defaults(config, []) == []
