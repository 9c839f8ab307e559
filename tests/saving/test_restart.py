"""The last step of which a run has a record."""

import json
from pathlib import Path

import pytest

from frontier_llm.saving.run_directory import recorded_steps
from frontier_llm.telemetry.jsonl import METRICS_FILE


def row(step: int, padding: int = 0) -> bytes:
    """Return the line of a step."""
    return json.dumps({"step": step, "text": "x" * padding}).encode() + b"\n"


@pytest.mark.parametrize(
    ("record", "step"),
    [
        (b"", 0),
        (b"\n\n", 0),
        (row(1), 1),
        (row(1) + row(2)[:-5], 1),  # killed while it wrote a line
        (row(1) + row(2)[:-1], 2),
        (row(3) + b"null\n[]\n{}\n", 3),
        (row(4) + row(5, 200_000), 5),
        (row(4) + row(5, 200_000)[:-9], 4),
        (row(6, 65_536) * 3 + b"{" * 65_530, 6),
        (b"{" * 300_000, 0),
    ],
)
def test_recorded_steps(tmp_path: Path, record: bytes, step: int) -> None:
    (tmp_path / METRICS_FILE).write_bytes(record)
    assert recorded_steps(tmp_path) == step


def test_a_run_without_a_record_has_no_steps(tmp_path: Path) -> None:
    assert recorded_steps(tmp_path) == 0


def test_a_long_record_is_read_from_its_end(tmp_path: Path) -> None:
    with (tmp_path / METRICS_FILE).open("wb") as file:
        file.truncate(1 << 40)  # needs no space on the disk
        file.seek(0, 2)
        file.write(b"\n" + row(7))
    assert recorded_steps(tmp_path) == 7
