"""Runs of every optimizer are killed and resumed to the bit, and resumed in another layout."""

import shutil
from pathlib import Path

import pytest

from tests.forked_train import TINY, Training, train
from tests.texts import prose
from tests.trainer.test_resume import SCHEDULE, STEPS, learned, same_states, wait_for

pytestmark = pytest.mark.slow

LAYOUT = (
    "launch.ranks=4", "parallel.tensor=2", "parallel.pipeline=1", "sharding=zero1",
    "checkpoint.every_steps=1",
)  # fmt: skip
OTHER_LAYOUT = (
    "launch.ranks=4", "parallel.tensor=1", "parallel.pipeline=2", "sharding=zero3",
    "run.resume=required",
)  # fmt: skip


@pytest.mark.parametrize(
    "optimizer",
    [
        "muon",
        pytest.param("adafactor", marks=pytest.mark.exhaustive),
        pytest.param("adamw_8bit", marks=pytest.mark.exhaustive),
    ],
)
def test_killed_resumed_and_resharded(optimizer: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(prose(40))
    keys = (
        *TINY, f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared",
        f"optimizer={optimizer}", *SCHEDULE, "optimizer.schedule=cosine",
        "optimizer.timescale_steps=null", "optimizer.learning_rate=0.003",
    )  # fmt: skip
    alone, run, copy = (tmp_path / name for name in ("alone", "run", "copy"))
    ended = train(*keys, *LAYOUT, f"run.dir={alone}", f"trainer.steps={STEPS}")
    assert ended.code == 0, ended.text

    first = Training(*keys, *LAYOUT, f"run.dir={run}", f"trainer.steps={STEPS}")
    wait_for(run / "checkpoints" / "step_00000003" / "manifest.json")
    first.kill()
    first.wait()
    shutil.copytree(run, copy)
    ended = train(*keys, *LAYOUT, f"run.dir={run}", f"trainer.steps={STEPS}")
    assert ended.code == 0, ended.text
    assert "resumed" in ended.text
    assert learned(run) == learned(alone)
    assert same_states(run, alone)

    ended = train(*keys, *OTHER_LAYOUT, f"run.dir={copy}", f"trainer.steps={STEPS}")
    assert ended.code == 0, ended.text
    for mine, wanted in zip(learned(copy), learned(alone), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-4)
