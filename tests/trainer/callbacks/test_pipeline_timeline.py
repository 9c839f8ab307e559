"""A run with a pipeline writes timeline.json, again after a resume, and draws it in the report."""

from collections import Counter
from pathlib import Path

import pytest

from frontier_llm.telemetry import report_sections, step_timeline
from frontier_llm.telemetry.step_timeline import TIMELINE_FILE, PassTimeline, StepTimeline
from frontier_llm.trainer.callbacks import measurements
from tests import forked_train
from tests.texts import prose

pytestmark = pytest.mark.slow

MICRO_BATCHES = 4


def train(run_dir: Path, *overrides: str) -> str:
    text = run_dir.parent / "text.txt"
    text.write_text(prose(40))
    ended = forked_train.train(
        *forked_train.TINY, f"run.dir={run_dir}", "parallel.pipeline=2", "parallel.schedule=zb_h1",
        f"data.path={text}", f"data.directory={run_dir}/../corpora",
        "run.allow_changes=[trainer.steps]", *overrides,
    )  # fmt: skip
    assert ended.code == 0, ended.text
    return (run_dir / "run.log").read_text()


def check(timeline: PassTimeline) -> None:
    """Each action is there once, nothing overlaps, and the share is that of the gaps."""
    count = Counter((a.stage, a.kind, a.micro_batch) for a in timeline.actions)
    assert set(count.values()) == {1}
    assert sum(kind == "forward" for _, kind, _ in count) == 2 * MICRO_BATCHES
    busy = 0.0
    for stage in (0, 1):
        actions = [action for action in timeline.actions if action.stage == stage]
        ends = [0.0, *(action.end_seconds for action in actions)]
        assert all(a.start_seconds >= end for a, end in zip(actions, ends, strict=False))
        busy += sum(a.end_seconds - a.start_seconds for a in actions)
    assert timeline.waiting_share == pytest.approx(1 - busy / (2 * timeline.seconds))
    assert timeline.seconds == max(action.end_seconds for action in timeline.actions)


def test_a_run_and_its_resume_write_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    text = train(run_dir, "trainer.steps=4")
    timeline = StepTimeline.read(run_dir)
    assert timeline is not None
    assert timeline.planned is not None
    assert timeline.step == 3
    check(timeline.measured)
    check(timeline.planned)
    keys = [
        [(a.stage, a.kind, a.micro_batch) for a in part.actions]
        for part in (timeline.measured, timeline.planned)
    ]
    assert keys[0] == keys[1]
    shares = timeline.measured.waiting_share, timeline.planned.waiting_share
    assert (
        f"stages waited {shares[0]:.1%} of the passes of a step (planned {shares[1]:.1%})" in text
    )
    report = (run_dir / "report.html").read_text()
    assert report.index('"planned pipeline"') < report.index('"measured pipeline"')

    for module in (step_timeline, report_sections, measurements):
        monkeypatch.setattr(module, "RECORDED_ACTIONS", 5)
    text = train(run_dir, "trainer.steps=8", "plan=off")
    resumed = StepTimeline.read(run_dir)
    assert resumed is not None
    assert resumed.step == 7
    assert resumed.planned is None
    assert len(resumed.measured.actions) == 2 * 5
    assert 0 < resumed.measured.waiting_share < 1
    assert resumed.measured.seconds > max(a.end_seconds for a in resumed.measured.actions)
    assert f"stages waited {resumed.measured.waiting_share:.1%} of the passes of a step\n" in text
    assert "the first 5 passes" in (run_dir / "report.html").read_text()

    (run_dir / TIMELINE_FILE).unlink()
    (run_dir / TIMELINE_FILE).mkdir()
    assert "timeline.json cannot be written" in train(run_dir, "trainer.steps=12")
