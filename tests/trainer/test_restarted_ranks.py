"""A run whose ranks are killed goes on by itself, and learns what an undisturbed run learns."""

from pathlib import Path

import psutil
import pytest

from tests.forked_train import TINY, Training, train
from tests.trainer.test_resume import SCHEDULE, STEPS, learned, read, same_states, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_ranks_are_killed_twice_and_the_run_goes_on(tmp_path: Path) -> None:
    sources = sorted((ROOT / "frontier_llm").rglob("*.py"))[:40]
    (tmp_path / "text.txt").write_text("\n\n".join(s.read_text() for s in sources))
    keys = (
        *TINY, *SCHEDULE, f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared",
        f"trainer.steps={STEPS}", "checkpoint.every_steps=1", "run.resume=never",
    )  # fmt: skip
    alone, run = tmp_path / "alone", tmp_path / "run"
    ended = train(*keys, f"run.dir={alone}")
    assert ended.code == 0, ended.text

    training = Training(*keys, f"run.dir={run}", "launch.restarts=1")
    for step in (2, 5):
        wait_for(run / "checkpoints" / f"step_{step:08d}" / "manifest.json")
        ranks = psutil.Process(training.pid).children()
        ranks[step % len(ranks)].kill()
    ended = training.wait()
    assert ended.code == 0, ended.text
    assert 1 <= ended.text.count("the run is started again") <= 2
    assert "was killed by SIGKILL" in ended.text
    assert learned(run) == learned(alone)
    assert read(run) == read(alone)
    assert same_states(run, alone)
