"""A start that is refused leaves no run directory behind."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cli import run_preparation
from frontier_llm.cli.compose import compose
from frontier_llm.cli.run_preparation import lock_run_dir, remove_unused_run_dir
from frontier_llm.cli.train import main
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.launch import failure
from frontier_llm.saving import run_directory


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def _lock(run_dir):
    lock_run_dir(decode(compose([f"run.dir={run_dir}"])))
    run_directory.write_config(Path(run_dir), "model: {}\n")
    return Path(run_dir)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["run.resume=required"], ConfigError),
        (["data=text", "data.path=nosuch.txt"], ConfigError),
        (["callbacks=[nosuch:Nope]"], ConfigError),
        (["telemetry.tensorboard=true"], ConfigError),
    ],
)
@pytest.mark.forked
def test_a_refused_start_leaves_nothing(tmp_path, overrides, error, monkeypatch):
    monkeypatch.setattr(run_preparation, "find_spec", lambda name: None)
    with pytest.raises(error):
        main([*overrides, "run.dir=runs/mine/first"])
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "run").mkdir()
    folder = _lock("run")
    remove_unused_run_dir(ranks_ended=True)
    assert (folder / run_directory.CONFIG).exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.log", "checkpoints", "mine.txt"])
def test_a_run_that_has_begun_stays(name):
    folder = _lock("runs/new")
    (folder / name).touch()
    remove_unused_run_dir(ranks_ended=True)
    assert (folder / name).exists()
    assert (folder / run_directory.CONFIG).exists()


@pytest.mark.parametrize("kind", ["user", "error", "died"])
@pytest.mark.parametrize("ranks_ended", [False, True])
def test_only_a_failure_whose_message_says_all_is_removed(kind, ranks_ended):
    folder = _lock("runs/new")
    failed = replace(failure.from_exception(0, FrontierError("no space")), kind=kind)
    failure.write(failed, folder / run_directory.FAILURES)
    remove_unused_run_dir(ranks_ended=ranks_ended)
    assert Path("runs").exists() == (not ranks_ended or kind != "user")
