"""Training with exchanged savers: equal losses, saves by schedule, and a bad saver is noticed."""

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint.saved_run import (
    WARM_UP_STEPS,
    Phase,
    PhaseFigures,
    RankFigures,
    RunFigures,
    Schedule,
)
from benchmarks.checkpoint.savers import PEERS, TwoPhase
from benchmarks.checkpoint_in_training import Rates, compare, limit_of, main
from tests.forked_train import run

pytestmark = pytest.mark.slow


def run_figures(*phases: PhaseFigures, losses: tuple[float, ...] = (6.0, 5.0)) -> RunFigures:
    return RunFigures((RankFigures(1000, phases),), losses, 0.0)


@pytest.mark.exhaustive
def test_savers_train_alike_and_restore_what_they_saved(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    savers = ["ours", "torch.save", "dcp-async-stager", "two-phase"]
    arguments = ["--quick", "--every", "1", "--savers", *savers]
    done = run(lambda: main([*arguments, "--folder", str(tmp_path), "--json", str(file)]))
    assert done.code == 0, done.text
    figures = json.loads(file.read_text())
    (case,) = figures["cases"]
    (comparison,) = case["comparisons"]
    assert [row["saver"] for row in comparison["rows"]] == savers
    assert all(row["blocked_ms"]["min"] > 0 for row in comparison["rows"])
    assert case["megabytes"] >= 2 * 2
    assert case["loss_difference"] < 1e-6
    assert [target["target"] for target in comparison["targets"]] == [2.2, 1.3, 48]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing is left"


def test_a_saver_that_saves_later_states_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(TwoPhase):
        def save(self, step: int) -> None:
            self._copies = dict(self._states.tensors)  # no copies: the next update changes them

        def settle(self) -> None:
            """Write nothing."""

        def restore(self) -> None:
            for name, tensor in self._states.tensors.items():
                tensor.copy_(self._copies[name])

    monkeypatch.setitem(PEERS, "two-phase", Late)
    arguments = ["--quick", "--every", "1", "--savers", "two-phase", "--folder", str(tmp_path)]
    done = run(lambda: main(["--ranks", "1", *arguments]))
    assert done.code == 1
    assert "two-phase did not restore what it saved" in done.text


def test_phases_follow_the_warm_up() -> None:
    schedule = Schedule.of([1, 5], steps=8)
    assert schedule.phases == (Phase(8, 0), Phase(8, 1), Phase(10, 5))
    assert schedule.steps == WARM_UP_STEPS + 8 + 8 + 10 + 1
    first = WARM_UP_STEPS + 1
    places = [schedule.place(step) for step in (1, first, first + 8, first + 16, schedule.steps)]
    assert places == [(None, 1), (0, 1), (1, 1), (2, 1), (None, 0)]
    due = [number for number in range(1, 11) if Phase(10, 5).is_due(number)]
    assert due == [1, 6]


def test_bounds_by_hand() -> None:
    rates = Rates(write=100.0, copy=1000.0)  # a save of 200 bytes: 2 s of writes, 0.2 s of copies
    assert limit_of("ours", 1, 1.0, 200, rates).step_seconds == pytest.approx(2.0)
    assert limit_of("ours", 4, 1.0, 200, rates) == limit_of("ours", 5, 1.0, 200, rates)
    assert limit_of("torch.save", 1, 1.0, 200, rates).step_seconds == pytest.approx(3.2)
    assert limit_of("two-phase", 1, 1.0, 200, rates).step_seconds == pytest.approx(2.4)
    assert limit_of("dcp-async-stager", 2, 1.0, 200, rates).step_seconds == pytest.approx(1.2)
    assert limit_of("ours", 1, 1.0, 200, rates).cause == "disk"
    assert limit_of("ours", 4, 1.0, 200, rates).cause == "step"


def test_targets_compare_savers_in_the_same_round() -> None:
    schedule = Schedule((Phase(2, 0), Phase(2, 1)))
    plain = PhaseFigures(2.0, 2.0)
    ours = [run_figures(plain, PhaseFigures(2.0, 2.2, [0.01])) for _ in range(2)]
    saved = [run_figures(plain, PhaseFigures(s, s, [1.0])) for s in (4.4, 6.6)]
    limits = {(name, 1): limit_of(name, 1, 1.0, 100, Rates(100.0, 1000.0))
              for name in ("ours", "torch.save")}  # fmt: skip
    (comparison,) = compare({"ours": ours, "torch.save": saved}, schedule, limits)
    end_to_end, blocked = comparison["targets"]
    assert end_to_end["ratio"]["all"] == pytest.approx([2.0, 3.0])
    assert end_to_end["is_met"]  # the median is 2.5
    assert blocked["ratio"]["median"] == pytest.approx(100)
    assert comparison["rows"][0]["slowdown"]["median"] == pytest.approx(1.1)
