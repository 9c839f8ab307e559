import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from frontier_llm.telemetry.jsonl import JsonlSink
from frontier_llm.telemetry.trackers import BestEffort, TensorBoardSink, WandbSink, run_id
from tests.patience import patient
from tests.telemetry.runs import step_metrics
from tests.telemetry.wandb_file import config_of, read_run

CONFIG = {"model": {"name": "gpt_tiny", "layers": 4}, "parallel": {"tensor": 2}}


def _wandb(run_dir, mode="offline"):
    return BestEffort("wandb", lambda: WandbSink(mode, "tests", run_dir, CONFIG))


def _tensorboard(run_dir):
    return BestEffort("tensorboard", lambda: TensorBoardSink(run_dir))


def _record(open_sink, run_dir, steps=3):
    """Write some steps to metrics.jsonl and to another sink, which must not stop the run."""
    sinks = [JsonlSink(run_dir), open_sink(run_dir)]
    for step in range(1, steps + 1):
        for sink in sinks:
            sink.write(step_metrics(step, validation_loss=4.5 if step == steps else None))
    for sink in sinks:
        sink.close()


def _metric_lines(run_dir):
    return (run_dir / "metrics.jsonl").read_text().splitlines()


@pytest.fixture
def _clean_wandb(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # it reads the environment once a process


@pytest.mark.usefixtures("_clean_wandb")
def test_an_offline_wandb_run_can_be_read_back(tmp_path, capfd):
    run_dir = tmp_path / "gpt tiny#1"
    run_dir.mkdir()
    _record(_wandb, run_dir)
    run, history = read_run(run_dir)
    assert run.project == "tests"
    assert run.display_name == "gpt tiny#1"
    assert run.run_id == run_id(run_dir)
    assert config_of(run)["model"] == CONFIG["model"]
    assert [row["_step"] for row in history] == [1, 2, 3]
    lines = [json.loads(line) for line in _metric_lines(run_dir)]
    assert [row["loss"] for row in history] == [line["loss"] for line in lines]
    assert history[2]["validation_loss"] == 4.5
    assert history[0]["sent_bytes/gradients/node"] == 21.5e6
    assert "wandb" not in "".join(capfd.readouterr())


@pytest.mark.usefixtures("_clean_wandb")
def test_a_wandb_file_is_whole_when_a_rank_leaves_at_once(tmp_path):
    """Local ranks are forked and leave without running the interpreter's exit handlers."""
    program = (
        "import os, pathlib, sys; from tests.telemetry import test_trackers as t;"
        "t._record(t._wandb, pathlib.Path(sys.argv[1])); os._exit(0)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, check=True, timeout=patient(60), cwd=Path(__file__).parents[2])
    _, history = read_run(tmp_path)
    assert [row["_step"] for row in history] == [1, 2, 3]


def test_two_run_directories_of_one_name_have_two_ids(tmp_path):
    first, second = run_id(tmp_path / "a" / "run"), run_id(tmp_path / "b" / "run")
    assert first != second
    assert first == run_id(tmp_path / "b" / ".." / "a" / "run")


def _bad_mode(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")


def _bad_server(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "nonsense")


def _file_in_the_way(run_dir, monkeypatch):
    (run_dir / "wandb").write_text("")


@pytest.mark.usefixtures("_clean_wandb")
@pytest.mark.parametrize("harm", [_bad_mode, _bad_server, _file_in_the_way])
def test_a_broken_wandb_is_said_once_and_stops_nothing(harm, tmp_path, monkeypatch, caplog):
    harm(tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="frontier_llm"):
        _record(_wandb, tmp_path)
    assert len(_metric_lines(tmp_path)) == 3
    assert len([r for r in caplog.records if "wandb is off" in r.message]) == 1


@pytest.mark.usefixtures("_clean_wandb")
def test_online_without_a_key_does_not_ask_for_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with caplog.at_level(logging.WARNING, logger="frontier_llm"):
        _record(lambda run_dir: _wandb(run_dir, "online"), tmp_path)
    assert "wandb login" in caplog.text
    assert len(_metric_lines(tmp_path)) == 3


def test_tensorboard_holds_what_the_steps_held(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    _record(_tensorboard, tmp_path)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(step, step_metrics(step).loss) for step in (1, 2, 3)]
    assert [step for step, _ in written] == [1, 2, 3]
    assert [v for _, v in written] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_tensorboard_that_cannot_write_stops_nothing(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="frontier_llm"):
        _record(_tensorboard, tmp_path)
    assert "tensorboard is off" in caplog.text
    assert len(_metric_lines(tmp_path)) == 3
