import json
import math
from contextlib import suppress

import pytest

from frontier_llm.errors import TrainingError
from frontier_llm.geometry.wire import Sent
from frontier_llm.telemetry.jsonl import JsonlSink
from tests.telemetry.runs import step_metrics


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def test_a_step_is_one_line_of_strict_json_with_the_documented_keys():
    metrics = step_metrics(
        7, loss=math.nan, grad_norm=math.inf, sent_bytes={"gradients": Sent(node=12.0, network=3.0)}
    )
    text = metrics.to_json()
    assert "\n" not in text
    row = json.loads(text, parse_constant=_refuse)
    assert row["step"] == 7
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["mfu"] is None
    assert row["skipped"] is False
    assert row["sent_bytes"] == {"gradients": {"package": 0.0, "node": 12.0, "network": 3.0}}
    assert {
        "learning_rate", "tokens", "step_seconds", "tokens_per_second",
        "model_tflops_per_device", "checkpoint_stall_seconds", "checkpoints_skipped",
        "archive_failures",
    } <= set(row)  # fmt: skip


def test_scalars_are_flat_and_finite():
    sent = {"tensor": Sent(node=5.0, network=6.0)}
    scalars = step_metrics(3, loss=math.nan, sent_bytes=sent).scalars()
    assert "loss" not in scalars
    assert "mfu" not in scalars
    assert scalars["sent_bytes/tensor/network"] == 6.0
    assert not any(name.startswith("allocator_bytes") for name in scalars), "a CPU has none"
    on_gpu = step_metrics(3, allocator_bytes={"allocated": 5, "reserved": 8}).scalars()
    assert on_gpu["allocator_bytes/reserved"] == 8.0
    assert scalars["step"] == 3.0


def test_lines_are_on_disk_before_the_run_ends(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.write(step_metrics(1))
    sink.write(step_metrics(2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    sink.close()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def fill(disk):
    with (disk / "other").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1000))


@pytest.mark.parametrize("is_open", [True, False], ids=["filled later", "filled before"])
def test_lines_wait_for_space_on_a_full_disk(small_disk, caplog, is_open):
    """A run must not end, and no line may be lost or cut, because other users fill a disk."""
    sink = JsonlSink(small_disk)
    if is_open:
        sink.write(step_metrics(1))
    fill(small_disk)
    steps = range(2 if is_open else 1, 40)
    for step in steps:
        sink.write(step_metrics(step))
    assert caplog.text.count("metrics.jsonl cannot be written: No space left") == 1
    on_disk = (small_disk / "metrics.jsonl").read_bytes()
    assert on_disk.count(b"\n") < 39
    assert not on_disk or on_disk.endswith(b"\n"), "no line is cut"
    (small_disk / "other").unlink()
    sink.write(step_metrics(40))
    sink.close()
    lines = (small_disk / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
    assert "no line is missing" in caplog.text


def test_lines_that_wait_are_cut_as_those_in_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(step_metrics(step))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").touch()
    sink.cut(1)
    sink.write(step_metrics(2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_lines_that_are_lost_are_counted(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path)
    sink.write(step_metrics(1))
    sink.write(step_metrics(2))
    sink.close()
    assert "lacks its last 2 lines" in caplog.text


def test_a_run_directory_that_is_gone_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"metrics\.jsonl"):
        JsonlSink(tmp_path / "gone")
