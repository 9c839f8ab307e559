"""A rank dies while the run ends: the last step is saved, and a request to stop is kept."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.trainer.callbacks.callback import StepEnd
from tests.forked_train import train
from tests.recovery.test_replaced_ranks import REPLACES, STEPS, Waits, corpus, watched
from tests.trainer.test_resume import lines, same_states

pytestmark = pytest.mark.slow
__all__ = ["corpus", "watched"]  # fixtures

KEYS = (
    "launch.ranks=2", "parallel.pipeline=1", "sharding=zero1", "sharding.optimizer=1",
    "sharding.grads=1", "checkpoint=lazy", "checkpoint.every_steps=100",
)  # fmt: skip


def die_once(run: str, rank: int) -> None:
    """Kill this process if it is the first one of rank 1."""
    started = (Path(run) / "ranks.jsonl").read_text().splitlines()
    ranks = [json.loads(line)["rank"] for line in started]
    if rank == 1 and ranks.count(1) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesInLastSave(Waits):
    """Dies while it writes the last step, which no other rank can commit."""

    def on_step_end(self, end: StepEnd) -> None:
        if self.context.progress.step == STEPS:
            write = RankFile.write
            place = self.context.config.run.dir, self.context.world.rank

            def slow(file: RankFile, buffer: torch.Tensor, size: int) -> None:
                time.sleep(0.2)
                die_once(*place)
                write(file, buffer, size)

            RankFile.write = slow  # type: ignore[method-assign]


class DiesWhenAskedToStop(Waits):
    """Dies in the step in which all ranks learn that the run is to stop."""

    def on_step_begin(self, step: int) -> None:
        if step == 4 and self.context.world.rank == 0:
            (Path(self.context.config.run.dir) / "STOP").touch()

    def on_step_end(self, end: StepEnd) -> None:
        if end.result.stop:
            die_once(self.context.config.run.dir, self.context.world.rank)


class DiesAfterLastSave(Waits):
    """Dies after the last step was saved, while another rank still works."""

    def on_stop(self, *, is_early: bool) -> None:
        die_once(self.context.config.run.dir, self.context.world.rank)


def callback(name: str) -> str:
    return f"callbacks=[{__name__}:{name}]"


def test_the_last_step_is_saved_again(
    corpus: tuple[str, ...], tmp_path: Path, watched: list[psutil.Process]
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train(*corpus, *KEYS, f"run.dir={alone}").code == 0
    ended = train(*corpus, *KEYS, *REPLACES, callback("DiesInLastSave"), f"run.dir={run}")
    assert ended.code == 0, ended.text
    assert "takes its place" in ended.text
    assert (run / "checkpoints" / f"step_{STEPS:08d}").is_dir()
    assert same_states(run, alone)
    assert len(lines(run)) == STEPS


def test_a_request_to_stop_outlives_a_rank(corpus: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train(*corpus, *KEYS, *REPLACES, callback("DiesWhenAskedToStop"), f"run.dir={run}")
    assert ended.code == 3, ended.text
    assert "takes its place" in ended.text
    (step,) = (int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    assert step == len(lines(run))
    assert step in (4, 5)
    assert not (run / "STOP").exists()


@pytest.mark.exhaustive
def test_a_run_that_has_saved_its_last_step_is_complete(
    corpus: tuple[str, ...], tmp_path: Path
) -> None:
    disks = f"checkpoint.tiers.local.path={tmp_path}/disks", "checkpoint.tiers.local.every_steps=1"
    run = tmp_path / "run"
    keys = (*corpus, *KEYS, *disks, *REPLACES, callback("DiesAfterLastSave"), f"run.dir={run}")
    ended = train(*keys)
    assert ended.code == 0, ended.text
    assert "takes its place" in ended.text
    assert (run / "checkpoints" / f"step_{STEPS:08d}").is_dir()
