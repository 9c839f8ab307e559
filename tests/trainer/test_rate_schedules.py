"""Runs under every learning-rate schedule: their metrics, a resume, and a rewind."""

import json
from pathlib import Path

import pytest

from frontier_lab.single_process_model import read_config
from frontier_llm.config import decode
from frontier_llm.saving.changes import changes, refuse
from frontier_llm.trainer.learning_rate import LearningRate
from tests.covering import covering
from tests.forked_train import TINY, train
from tests.texts import prose
from tests.values import tiny_values

pytestmark = pytest.mark.slow

STEPS = 8
NEW_SCHEDULE = "the schedule is that of a run with the new settings"
ENDS = "optimizer.decay_steps=8"
SCHEDULES = {
    "cosine": (ENDS,),
    "linear": (ENDS,),
    "constant": (),
    "wsd": (ENDS, "optimizer.cooldown_steps=4"),
    "inverse_sqrt": ("optimizer.timescale_steps=3",),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The overrides of a tiny run on a small corpus of its own."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(prose(20))
    where = (f"data.path={folder}/text.txt", f"data.directory={folder}/prepared")
    return (*TINY, *where, "optimizer.warmup_steps=2")


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def learned(run: Path) -> list[tuple[float, ...]]:
    return [(m["step"], m["learning_rate"], m["loss"], m["grad_norm"]) for m in lines(run)]


@pytest.mark.parametrize("schedule", covering(SCHEDULES, set(SCHEDULES) - {"wsd"}))
def test_a_resumed_run_continues_with_the_same_rates(
    schedule: str, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = (*tiny, f"optimizer.schedule={schedule}", *SCHEDULES[schedule])
    whole = train(*chosen, f"run.dir={tmp_path}/whole", f"trainer.steps={STEPS}")
    assert whole.code == 0, whole.text
    assert f"rates      {schedule}: " in (tmp_path / "whole" / "run.log").read_text()
    for steps in (5, STEPS):
        ended = train(*chosen, f"run.dir={tmp_path}/parts", f"trainer.steps={steps}")
        assert ended.code == 0, ended.text
    assert "resumed    step 5" in ended.text
    assert NEW_SCHEDULE not in " ".join(ended.text.split()), "the rates do not depend on the steps"
    assert learned(tmp_path / "parts") == learned(tmp_path / "whole")
    rate = LearningRate.of(read_config(tmp_path / "whole"))
    assert [m[1] for m in learned(tmp_path / "whole")] == [rate(n) for n in range(1, STEPS + 1)]


def test_a_longer_schedule_says_how_its_rates_go_on(tiny: tuple[str, ...], tmp_path: Path) -> None:
    chosen = (*tiny, "optimizer.schedule=cosine", f"run.dir={tmp_path}/run")
    assert train(*chosen, "trainer.steps=3").code == 0
    ended = train(*chosen, "trainer.steps=6", "run.allow_changes=[trainer.steps]")
    assert ended.code == 0, ended.text
    assert f"in step 4: {NEW_SCHEDULE}" in " ".join(ended.text.split())


@pytest.mark.parametrize("schedule", covering(["wsd", "inverse_sqrt"], ["wsd"]))
def test_a_rewind_repeats_the_rates_of_the_steps(
    schedule: str, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """Every rise of the loss counts as a spike here; the second rewind is an error."""
    run = tmp_path / "run"
    ended = train(
        *tiny, f"run.dir={run}", f"optimizer.schedule={schedule}", "trainer.steps=60",
        "checkpoint.every_steps=2", "trainer.spike_factor=1.0001", "trainer.spike_window=1",
        "trainer.rewinds_allowed=1",
    )  # fmt: skip
    assert ended.code == 1, ended.text
    assert "after 1 rewinds" in ended.text
    assert sum(entry.get("event") == "rewind" for entry in lines(run, "ledger.jsonl")) == 1
    rate = LearningRate.of(read_config(run))
    steps = [m["step"] for m in lines(run)]
    assert [m["learning_rate"] for m in lines(run)] == [rate(round(step)) for step in steps]


def test_a_checkpoint_without_a_key_has_its_default() -> None:
    now = tiny_values()
    before = {**now, "optimizer": {k: v for k, v in now["optimizer"].items() if k != "schedule"}}
    assert changes(before, now) == {}
    linear = {**now, "optimizer": {**now["optimizer"], "schedule": "linear"}}
    assert changes(before, linear) == {"optimizer.schedule": ("cosine", "linear")}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_may_change_if_rates_do_not_depend_on_them(schedule: str) -> None:
    now = tiny_values(f"optimizer.schedule={schedule}")
    longer = {**now, "trainer": {**now["trainer"], "steps": 500}}
    found = changes(now, longer)
    assert list(found) == ["trainer.steps"]
    if schedule in ("constant", "inverse_sqrt"):
        refuse(found, decode(longer))
    else:
        with pytest.raises(Exception, match=r"run\.allow_changes=\[trainer\.steps\]"):
            refuse(found, decode(longer))
