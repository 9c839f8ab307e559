"""metrics.jsonl after a crash: what is damaged is cut off, and the run goes on."""

import json

import pytest

from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.jsonl import METRICS_FILE, cut

ROWS = [json.dumps({"step": step, "loss": 1.0}).encode() + b"\n" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "damaged",
    [bytes(40) + b"\n", b"{}\n", b"7\n", b'{"step": "3"}\n', b"\xff\xfe\n", b"\n", ROWS[2][:-1]],
    ids=["zeros", "no step", "no object", "no number", "no text", "empty", "torn"],
)
def test_the_record_ends_before_its_first_damaged_line(tmp_path, damaged):
    file = tmp_path / METRICS_FILE
    after = ROWS[3] if damaged.endswith(b"\n") else b""
    file.write_bytes(b"".join(ROWS[:2]) + damaged + after)
    cut(tmp_path, step=9)
    assert file.read_bytes() == b"".join(ROWS[:2])


def test_steps_that_are_made_again_are_cut(tmp_path):
    file = tmp_path / METRICS_FILE
    file.write_bytes(b"".join(ROWS))
    cut(tmp_path, step=3)
    assert History.read(tmp_path).steps == [1, 2, 3]
    cut(tmp_path / "nowhere", step=3)
