"""frontier-llm funnel: the best settings of a stage are the next one's trials."""

import json
import subprocess
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from frontier_lab.sweeps import funnel
from frontier_lab.sweeps.funnel import Stage, best_settings, main, report, run, settings_of
from frontier_lab.sweeps.sweep_trials import Trial
from frontier_llm.cli.options import run_command
from frontier_llm.errors import ConfigError, TrainingError

pytestmark = pytest.mark.slow

AXES = ["optimizer.learning_rate=tag(log, interval(1e-4, 1e-2))", "data.micro_batch=choice(1,2)"]


def trial(rate: float, micro_batch: int, loss: float | None) -> Trial:
    settings = [f"optimizer.learning_rate={rate}", f"data.micro_batch={micro_batch}"]
    status = "failed" if loss is None else "done"
    return Trial(["model=gpt_tiny", *settings], status, "", 1.0, 1.0, None, loss, loss)


TRIALS = (
    trial(1e-2, 1, None),
    trial(3e-3, 2, 3.0),
    trial(1e-3, 2, 2.0),
    trial(1e-3, 2, 2.5),
    trial(1e-4, 1, 4.0),
)


def written(folder: Path, trials: tuple[Trial, ...] = TRIALS) -> Path:
    for number, one in enumerate(trials):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "trial.json").write_text(json.dumps(asdict(one)))
    return folder


def test_the_best_settings_survive_each_once():
    ranked = sorted(TRIALS, key=funnel._loss)
    best = ["data.micro_batch=2", "optimizer.learning_rate=0.001"]
    assert best_settings(ranked, AXES, 1) == [best]
    assert best_settings(ranked, AXES, 9) == [
        best,
        ["data.micro_batch=2", "optimizer.learning_rate=0.003"],
        ["data.micro_batch=1", "optimizer.learning_rate=0.0001"],
    ]


def test_the_second_stage_trains_what_the_first_one_chose(tmp_path, monkeypatch):
    tried = []

    def run_trial(overrides, folder, limit):
        tried.append((overrides, folder.name, limit))
        rate = float(overrides[-1].partition("=")[2])
        return Trial(overrides, "done", "", 1.0, 1.0, None, rate, 1e3 * rate)

    monkeypatch.setattr(funnel, "run_trial", run_trial)
    stages = [
        Stage(("model=gpt_tiny",), len(TRIALS), written(tmp_path / "1")),
        Stage(("model=gpt_125m", "trainer.steps=3"), 2, tmp_path / "2"),
    ]
    results = run(stages, ["launch.trial_minutes=2", *AXES])
    common = ["model=gpt_125m", "trainer.steps=3", "launch.trial_minutes=2", "data.micro_batch=2"]
    assert tried == [
        ([*common, "optimizer.learning_rate=0.001"], "0", 120),
        ([*common, "optimizer.learning_rate=0.003"], "1", 120),
    ]
    assert [one.validation_loss for one in results[1]] == [1.0, 3.0]
    assert run(stages, ["launch.trial_minutes=2", *AXES]) == results, "what is done stays"
    assert len(tried) == 2
    lines = report(stages, results).splitlines()
    assert lines[2] == "## model=gpt_125m trainer.steps=3: 2 trials"
    assert lines[4] == "| validation loss | optimizer.learning_rate | data.micro_batch | result |"
    assert lines[6] == "| 1.0000 | 0.001 | 2 | done |"
    assert lines[-1] == "| - | 0.01 | 1 | failed |"


def test_an_interrupted_search_goes_on_beside_what_is_done(tmp_path, monkeypatch):
    folder = written(tmp_path / "1", TRIALS[1:2])
    kept = (folder / "0" / "trial.json").read_bytes()
    (folder / "1" / "run").mkdir(parents=True)
    (folder / "1" / "run" / "metrics.jsonl").write_text("of the trial that was interrupted")
    commands = []

    def search(command, **_):
        commands.append(command)
        (where,) = (word.partition("=")[2] for word in command if "sweep.dir=" in word)
        written(Path(where), TRIALS[2:4])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", search)
    stage = Stage(("model=gpt_tiny",), 3, folder)
    [ranked] = run([stage], AXES)
    assert [one.validation_loss for one in ranked] == [2.0, 3.0]
    assert "hydra.sweeper.n_trials=2" in commands[0]
    assert f"hydra.sweep.dir={folder}/from_1" in commands[0]
    assert (folder / "0" / "trial.json").read_bytes() == kept
    assert run([stage], AXES) == [ranked]
    assert len(commands) == 1, "all are done"


def test_a_stage_without_a_survivor_ends_the_funnel(tmp_path):
    stage = Stage(("model=gpt_tiny",), 1, written(tmp_path, (trial(1.0, 1, None),)))
    with pytest.raises(TrainingError, match="no trial of model=gpt_tiny"):
        run([stage], AXES)


def test_nothing_to_search_for_and_wrong_keys_are_refused(tmp_path, capsys):
    stage = Stage(("model=gpt_tiny",), 1, tmp_path)
    with pytest.raises(ConfigError, match="an axis to search"):
        run([stage], ["trainer.steps=3"])
    wrong = ["--folder", str(tmp_path), "--stage", "model=gpt_tny", "2", *AXES]
    assert run_command(partial(main, wrong)) == 2
    assert "gpt_tiny" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--stage", "model=gpt_tiny", "many", *AXES])
    with pytest.raises(ConfigError, match="use --folder"):
        main(["--stage", "model=gpt_tiny", "2", *AXES, f"hydra.sweep.dir={tmp_path}/other"])
    with pytest.raises(ConfigError, match="a funnel sets this key"):
        main(["--stage", "model=gpt_tiny launch.trial_value=speed", "2", *AXES])


@pytest.mark.exhaustive
def test_optuna_searches_the_first_stage(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (tmp_path / "text.txt").write_text("\n\n".join([Path(__file__).read_text()] * 8))
    common = [
        "data=text", f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared",
        "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocabulary=300",
        "data.vocabulary=300", "data.sequence_length=16", "data.global_batch=4", "precision=fp32",
        "parallel.pipeline=1", "launch.ranks=1", "trainer.evaluate_batches=1",
        "optimizer.learning_rate=tag(log, interval(1e-3, 1e-2))",
    ]  # fmt: skip
    [first] = run([Stage(("trainer.steps=2",), 2, tmp_path / "1")], common)
    assert [one.status for one in first] == ["done"] * 2
    rates = [float(settings_of(one, common[-1:])[0].partition("=")[2]) for one in first]
    assert rates[0] != rates[1]
    assert all(1e-3 <= rate <= 1e-2 for rate in rates)
    assert first[0].validation_loss <= first[1].validation_loss
