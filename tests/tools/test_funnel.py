"""tools/funnel.py: the best settings of a stage are the next one's trials."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from frontier_llm.errors import ConfigError, TrainingError
from tools import funnel
from tools.funnel import Stage, main, report, run, survivors
from tools.sweep import Point

AXES = ["optimizer.learning_rate=tag(log, interval(1e-4, 1e-2))", "data.micro_batch=choice(1,2)"]


def trial(rate: float, micro_batch: int, loss: float | None) -> Point:
    settings = [f"optimizer.learning_rate={rate}", f"data.micro_batch={micro_batch}"]
    status = "failed" if loss is None else "done"
    return Point(["model=gpt_tiny", *settings], status, "", 1.0, 1.0, None, loss, loss)


TRIALS = (
    trial(1e-2, 1, None),
    trial(3e-3, 2, 3.0),
    trial(1e-3, 2, 2.0),
    trial(1e-3, 2, 2.5),
    trial(1e-4, 1, 4.0),
)


def written(folder: Path, trials: tuple[Point, ...] = TRIALS) -> Path:
    for number, one in enumerate(trials):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "point.json").write_text(json.dumps(asdict(one)))
    return folder


def test_the_best_settings_survive_each_once():
    ranked = sorted(TRIALS, key=funnel._loss)
    best = ["data.micro_batch=2", "optimizer.learning_rate=0.001"]
    assert survivors(ranked, AXES, 1) == [best]
    assert survivors(ranked, AXES, 9) == [
        best,
        ["data.micro_batch=2", "optimizer.learning_rate=0.003"],
        ["data.micro_batch=1", "optimizer.learning_rate=0.0001"],
    ]


def test_the_second_stage_trains_what_the_first_one_chose(tmp_path, monkeypatch):
    tried = []

    def run_point(overrides, folder, limit):
        tried.append((overrides, folder.name, limit))
        rate = float(overrides[-1].partition("=")[2])
        return Point(overrides, "done", "", 1.0, 1.0, None, rate, 1e3 * rate)

    monkeypatch.setattr(funnel, "run_point", run_point)
    stages = [
        Stage(("model=gpt_tiny",), len(TRIALS), written(tmp_path / "1")),
        Stage(("model=gpt_125m", "trainer.steps=3"), 2, tmp_path / "2"),
    ]
    results = run(stages, ["launch.point_minutes=2", *AXES])
    common = ["model=gpt_125m", "trainer.steps=3", "launch.point_minutes=2", "data.micro_batch=2"]
    assert tried == [
        ([*common, "optimizer.learning_rate=0.001"], "0", 120),
        ([*common, "optimizer.learning_rate=0.003"], "1", 120),
    ]
    assert [point.validation_loss for point in results[1]] == [1.0, 3.0]
    assert run(stages, ["launch.point_minutes=2", *AXES]) == results, "what is done stays"
    assert len(tried) == 2
    lines = report(stages, results).splitlines()
    assert lines[2] == "## model=gpt_125m trainer.steps=3: 2 trials"
    assert lines[4] == "| validation loss | optimizer.learning_rate | data.micro_batch | came to |"
    assert lines[6] == "| 1.0000 | 0.001 | 2 | done |"
    assert lines[-1] == "| - | 0.01 | 1 | failed |"


def test_a_stage_without_a_survivor_ends_the_funnel(tmp_path):
    stage = Stage(("model=gpt_tiny",), 1, written(tmp_path, (trial(1.0, 1, None),)))
    with pytest.raises(TrainingError, match="no trial of model=gpt_tiny"):
        run([stage], AXES)


def test_nothing_to_search_for_and_wrong_keys_are_refused(tmp_path, capsys):
    stage = Stage(("model=gpt_tiny",), 1, tmp_path)
    with pytest.raises(ConfigError, match="an axis to search"):
        run([stage], ["trainer.steps=3"])
    wrong = ["--folder", str(tmp_path), "--stage", "model=gpt_tny", "2", *AXES]
    assert main(wrong) == 2
    assert "gpt_tiny" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--stage", "model=gpt_tiny", "many", *AXES])
