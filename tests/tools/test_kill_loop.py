"""The loop of kills: it kills real runs, and it would notice what must not be."""

import json
from pathlib import Path

import pytest

from frontier_llm.checkpoint.names import FOLDER, MANIFEST, partial_folder, step_folder
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer.ledger import Ledger
from tools.kill_loop import main
from tools.kills.evidence import Scene, look, steps
from tools.kills.tally import Tally


def scene(committed: int | None, *resumes: int) -> Scene:
    return Scene(committed, is_saving=False, steps_read=9, resumes=resumes)


def write_metrics(run_dir: Path, *found: int) -> None:
    lines = [json.dumps({"step": step, "loss": 1 / step, "grad_norm": 0.5}) for step in found]
    (run_dir / METRICS_FILE).write_text("\n".join([*lines, '{"step": 9, "lo']))


def test_runs_are_killed_and_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tally.json"
    code = main(["--kills", "2", "--steps", "12", "--seed", "5", "--json", str(file)])
    text = capfd.readouterr().out
    assert code == 0, text
    assert "0 lost commits, 0 wrong losses, 0 other failures" in text
    tally = json.loads(file.read_text())
    assert len(tally["kills"]) == 2
    assert all(kill["seconds_to_end"] < 60 for kill in tally["kills"])
    assert tally["resumes"] + tally["new_starts"] >= 2
    assert tally["completed"] >= 1, "the last run is seen to its end"
    assert tally["compared"] >= 12


def test_a_lost_commit_is_noticed() -> None:
    tally = Tally()
    tally.follow("run_1", scene(7, 3), scene(8, 3, 7))
    assert (tally.resumes, tally.lost) == (1, [])
    tally.follow("run_1", scene(8, 3, 7), scene(9, 3, 7, 6))
    assert tally.lost == ["run_1: step 8 was there, went on from 6"]
    tally.follow("run_2", scene(4), scene(None))
    assert tally.lost[1] == "run_2: step 4 was there, None is"
    assert not tally.is_clean


def test_a_loss_that_differs_in_its_last_bit_is_noticed() -> None:
    tally = Tally()
    usual = {1: (0.1, 0.5), 2: (0.3, 0.5)}
    tally.compare("run_1", {1: (0.1, 0.5)}, usual)
    assert tally.is_clean
    tally.compare("run_1", {2: (0.1 + 0.2, 0.5)}, usual)
    assert len(tally.wrong) == 1
    assert "run_1, step 2" in tally.wrong[0]
    assert tally.to_dict()["compared"] == 2


def test_what_a_directory_says(tmp_path: Path) -> None:
    assert look(tmp_path / "absent") == Scene(None, False, 0, ())
    for name in (step_folder(3), partial_folder(4)):
        (tmp_path / FOLDER / name).mkdir(parents=True)
        (tmp_path / FOLDER / name / MANIFEST).touch()
    ledger = Ledger(tmp_path)
    for step in (1, 2, 3):
        ledger.step(step, 4 * step, 4, 99)
    ledger.event("resume", 2, changes={})
    ledger.step(3, 12, 4, 99)
    found = look(tmp_path)
    assert found == Scene(3, True, 4, (2,))
    assert found.phase(3, last_step=9) == "during a save"
    assert found.phase(4, last_step=9) == "starting"
    assert found.phase(3, last_step=3) == "at the end"
    later = look(tmp_path, since=(tmp_path / FOLDER).stat().st_mtime + 1000)
    assert later.phase(3, last_step=9) == "between saves", "the partial folder is an old one"
    write_metrics(tmp_path, 1, 2, 4)
    assert steps(tmp_path) == {1: (1.0, 0.5), 2: (0.5, 0.5), 4: (0.25, 0.5)}
    write_metrics(tmp_path, 1, 2, 2)
    with pytest.raises(ValueError, match="step 2 is there twice"):
        steps(tmp_path)
