"""The benchmark of savers: all restore what they saved, and one that does not is reported."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench_checkpoint import main, summary
from benchmarks.checkpoint import saver_turn
from benchmarks.checkpoint.saver_turn import KnownStates, Save, SaverFigures
from benchmarks.checkpoint.savers import SAVERS, Saver, TorchSave

pytestmark = pytest.mark.slow

TINY = (
    "--megabytes", "2", "--rounds", "1", "--saves", "1", "--long-seconds", "0.05",
    "--short-seconds", "0.01", "--short-steps", "2", "--restores", "1",
)  # fmt: skip
SAVE = Save(
    begin_seconds=0.001, fence_seconds=0.002, durable_seconds=0.5, compute_share=0.9,
    step_seconds=2.2, plain_step_seconds=2.0,
)  # fmt: skip
RANK = SaverFigures(
    saves=(SAVE,), short_seconds=3.0, plain_short_seconds=2.0, restore_seconds=(0.5, 0.25),
    states_bytes=100, disk_bytes=240,
)  # fmt: skip


@pytest.fixture(autouse=True)
def briefly_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_turn, "CALIBRATION_SECONDS", 0.05)


@pytest.mark.exhaustive
def test_every_saver_restores_what_it_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert main([*TINY, "--folder", str(tmp_path), "--json", str(file)]) == 0, capfd.readouterr()
    figures = json.loads(file.read_text())
    assert [row["saver"] for row in figures["savers"]] == list(SAVERS)
    for row in figures["savers"]:
        assert row["error"] is None
        assert row["blocked_seconds"] > 0
        assert (row["restore_rate"] is None) == (row["saver"] == "bare-writes")
        assert (row["durable_seconds"] is None) == (row["saver"] == "torch.save")
        for rank in row["rounds"][0]:
            assert rank["disk_bytes"] >= 2 * rank["states_bytes"], "both ranks' files were seen"
    assert figures["disk_bytes_per_second"]["write"] > 0
    text = capfd.readouterr().out
    assert "dcp-async-stager" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json"], "nothing is left"


def test_a_saver_that_loses_a_step_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Forgetful(Saver):
        def save(self, step: int) -> None:
            """Save nothing."""

        def restore(self) -> None:
            for tensor in self._states.tensors.values():
                tensor.zero_()

    monkeypatch.setitem(SAVERS, "dcp", Forgetful)
    arguments = [*TINY, "--folder", str(tmp_path), "--savers", "dcp", "--ranks", "1"]
    assert main(arguments) == 1
    assert "dcp did not restore what it saved" in capfd.readouterr().err


def test_files_that_a_slow_rank_is_deleting_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DeletesLate(TorchSave):
        def save(self, step: int) -> None:
            previous = self._place.folder / f"previous_{self._place.rank}"
            previous.touch()
            super().save(step)
            time.sleep(0.3 * self._place.rank)
            previous.unlink()

    def drop(paths: list[Path]) -> None:
        assert not [path for path in paths if path.name.startswith("previous")]

    monkeypatch.setattr(saver_turn, "drop_from_cache", drop)
    monkeypatch.setitem(SAVERS, "dcp", lambda s, p: DeletesLate(s, p, sync=False))
    assert main([*TINY, "--folder", str(tmp_path), "--savers", "dcp"]) == 0


def test_known_states_notice_a_single_element() -> None:
    states = KnownStates(1, 2, 3_000_000)
    assert 2_900_000 < states.size <= 3_000_000
    states.update()
    states.update()
    assert states.holds(2)
    assert not states.holds(1)
    tensor = next(iter(states.tensors.values()))
    tensor[-1] += 1
    assert not states.holds(2)


def test_figures_are_those_of_the_slowest_rank() -> None:
    slow = replace(SAVE, begin_seconds=0.1, durable_seconds=0.7, step_seconds=4.0)
    late = replace(RANK, saves=(slow,), short_seconds=5.0, restore_seconds=(1.0, 1.0))
    found = summary([[RANK, late]])
    assert found["blocked_seconds"] == pytest.approx(0.102)
    assert found["durable_seconds"] == 0.7
    assert found["step_ratio"] == 2.0
    assert found["short_ratio"] == 2.5
    assert found["restore_rate"] == 200
    unknown = replace(RANK, saves=(replace(SAVE, durable_seconds=None, compute_share=None),))
    assert summary([[RANK, unknown]])["durable_seconds"] is None
