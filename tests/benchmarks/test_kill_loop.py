"""The loop of kills kills real runs and notices lost checkpoints and wrong losses."""

import json
from pathlib import Path

import pytest

from benchmarks.faults.kill_loop import KillSummary, main
from benchmarks.faults.run_files import RunSnapshot, read_steps, take_snapshot
from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, partial_folder, step_folder
from frontier_llm.saving.ledger_file import LedgerFile
from frontier_llm.telemetry.jsonl import METRICS_FILE

pytestmark = pytest.mark.slow


def snapshot(committed: int | None, *resumes: int) -> RunSnapshot:
    return RunSnapshot(committed, is_saving=False, steps_started=9, resumes=resumes)


def write_metrics(run_dir: Path, *found: int) -> None:
    lines = [json.dumps({"step": step, "loss": 1 / step, "grad_norm": 0.5}) for step in found]
    (run_dir / METRICS_FILE).write_text("\n".join([*lines, '{"step": 9, "lo']))


@pytest.mark.exhaustive
def test_runs_are_killed_and_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "summary.json"
    code = main(["--kills", "2", "--steps", "12", "--seed", "5", "--json", str(file)])
    text = capfd.readouterr().out
    assert code == 0, text
    assert "0 lost commits, 0 wrong losses, 0 other failures" in text
    summary = json.loads(file.read_text())
    assert len(summary["kills"]) == 2
    assert all(kill["seconds_to_end"] < 60 for kill in summary["kills"])
    assert summary["resumes"] + summary["new_starts"] >= 2
    assert summary["completed"] >= 1, "the last run is brought to its end"
    assert summary["compared"] >= 12


def test_a_lost_commit_is_noticed() -> None:
    summary = KillSummary()
    summary.follow("run_1", snapshot(7, 3), snapshot(8, 3, 7))
    assert (summary.resumes, summary.lost) == (1, [])
    summary.follow("run_1", snapshot(8, 3, 7), snapshot(9, 3, 7, 6))
    assert summary.lost == ["run_1: step 8 was saved, resumed from 6"]
    summary.follow("run_2", snapshot(4), snapshot(None))
    assert summary.lost[1] == "run_2: step 4 was saved, now the newest is None"
    assert summary.errors == summary.lost


def test_a_loss_that_differs_in_its_last_bit_is_noticed(tmp_path: Path) -> None:
    summary = KillSummary()
    write_metrics(tmp_path, 1, 2)
    usual = {1: (1.0, 0.5), 2: (0.5, 0.5)}
    summary.compare(tmp_path, usual)
    assert not summary.errors
    summary.compare(tmp_path, {**usual, 2: (0.5 + 2e-16, 0.5)})
    assert [tmp_path.name in text and "step 2" in text for text in summary.wrong] == [True]
    assert summary.to_dict()["compared"] == 2
    write_metrics(tmp_path, 1, 2, 2)
    assert summary.compare(tmp_path, usual).keys() == {1, 2}
    assert summary.wrong[1] == f"{tmp_path.name}: step 2 occurs twice"


def test_a_snapshot_of_a_run_directory(tmp_path: Path) -> None:
    assert take_snapshot(tmp_path / "absent") == RunSnapshot(None, False, 0, ())
    for name in (step_folder(3), partial_folder(4)):
        (tmp_path / FOLDER / name).mkdir(parents=True)
        (tmp_path / FOLDER / name / MANIFEST).touch()
    ledger = LedgerFile(tmp_path)
    for step in (1, 2, 3):
        ledger.step(step, 4 * step, 4, 99)
    ledger.event("resume", 2, changes={})
    ledger.step(3, 12, 4, 99)
    found = take_snapshot(tmp_path)
    assert found == RunSnapshot(3, True, 4, (2,))
    assert found.phase(3, last_step=9) == "during a save"
    assert found.phase(4, last_step=9) == "starting"
    assert found.phase(3, last_step=3) == "at the end"
    later = take_snapshot(tmp_path, since=(tmp_path / FOLDER).stat().st_mtime + 1000)
    assert later.phase(3, last_step=9) == "between saves", "the partial folder is a leftover"
    write_metrics(tmp_path, 1, 2, 4)
    assert read_steps(tmp_path, "loss") == ({1: (1.0,), 2: (0.5,), 4: (0.25,)}, [])


@pytest.mark.exhaustive
def test_nodes_are_lost_and_runs_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "losses.json"
    code = main(["--nodes", "--kills", "2", "--steps", "40", "--seed", "2", "--json", str(file)])
    assert code == 0, capfd.readouterr().out
    found = json.loads(file.read_text())
    assert len(found["kills"]) == 2
    assert (found["lost"], found["wrong"], found["failed"]) == ([], [], [])
    assert found["compared"] >= 40
