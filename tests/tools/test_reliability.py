"""What the proofs of reliability read and write; the proofs themselves need a Slurm and minutes."""

import json
import re

import pytest

from frontier_llm.errors import LaunchError
from tools import reliability
from tools.reliability import Outcome
from tools.slurm_lab import cluster as lab
from tools.slurm_lab.faults import FAULTS
from tools.slurm_lab.jobs import losses_of

SEEN = Outcome("rank killed", 3.2, "failed, exit code 1", 12.0, 20, 7, "rank 3", True, 0.0)


def test_the_table_says_who_was_named_and_who_was_not():
    unnamed = Outcome("link cut", 61.0, "requeued", 12.0, 20, 7, "", False, 1e-3)
    rows = reliability._table([SEEN, unnamed]).splitlines()
    assert rows[2] == ("| rank killed | 3.2 s | failed, exit code 1 | 12.0 s | 7 | `rank 3` | 0 |")
    assert "**not named**" in rows[3]
    assert rows[3].endswith("| 0.001 |")


def test_each_start_of_a_job_says_where_it_went_on():
    said = "x resumed    step 40 of runs/a/checkpoints/step_40; validation\nresumed    step 60 of b"
    assert reliability._resumptions(said) == [40, 60]


def test_the_last_line_of_a_file_being_written_is_left_out(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "lo']))
    assert losses_of(tmp_path) == {1: 1.0, 2: 0.5}
    assert losses_of(tmp_path / "nothing") == {}


def test_every_faults_culprit_can_be_searched_for():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        re.compile(fault.culprit)


def test_without_slurm_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "kept").touch()
    with (
        pytest.raises(LaunchError, match="not installed: munged"),
        lab.SlurmCluster(tmp_path, 2, 4, 2, tmp_path / "local"),
    ):
        pass
    assert (tmp_path / "kept").exists()
