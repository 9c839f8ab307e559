"""Files of a run with wrong values: a report is made within limits, and says what is left out."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.saving.ledger_file import LedgerFile, blend_of
from frontier_llm.telemetry import figures
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.jsonl import LEDGER, METRICS_FILE
from frontier_llm.telemetry.report_page import make_report
from frontier_llm.telemetry.step_timeline import TIMELINE_FILE
from frontier_llm.telemetry.summary import SUMMARY_FILE, Layout, RankSummary, RunSummary
from tests.hostile import changed, cpu_seconds, leaves
from tests.telemetry.runs import ranks_of, step_metrics

pytestmark = pytest.mark.forked  # a limit of the processor's time needs the main thread
VALUES: list[Any] = [
    -1, 0, 10**7, 2**63, 10**400, 1e308, -1e308, math.nan, math.inf, "x" * 1000, None, [], {},
]  # fmt: skip
ROW = json.loads(step_metrics(3).to_json())
TIMELINE: dict[str, Any] = {
    "step": 3, "planned": None,
    "measured": {"seconds": 1.0, "waiting_share": 0.1, "actions": [
        {"stage": stage, "kind": "forward", "virtual_stage": 0, "micro_batch": 0,
         "start_seconds": 0.1, "end_seconds": 0.2} for stage in range(2)]},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    layout = Layout(tensor=1, pipeline=2, data=2, ranks_per_node=2)
    summary = RunSummary(
        layout=layout, ranks=ranks_of(layout, 8), parameters=5, seconds=3.5, tokens=7,
        initial_validation_loss=5.0, validation_loss=3.0, total_steps=9, exit_code=0,
    )  # fmt: skip
    summary.write(tmp_path)
    rows = [step_metrics(step).to_json() for step in range(1, 9)]
    (tmp_path / METRICS_FILE).write_text("\n".join(rows) + "\n")
    (tmp_path / TIMELINE_FILE).write_text(json.dumps(TIMELINE))
    return tmp_path


def report(run: Path) -> str:
    with cpu_seconds(10):
        page = make_report(run)
    assert len(page) < 5_000_000
    return page


def test_a_good_run_has_nothing_damaged(run: Path) -> None:
    page = report(run)
    assert "Damaged files" not in page
    assert "<h2>Pipeline</h2>" in page


def edits(content: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for path in leaves(content):
        for new in VALUES:
            yield path, new


@pytest.mark.parametrize("name", [SUMMARY_FILE, TIMELINE_FILE])
def test_no_value_ends_in_a_traceback(name: str, run: Path, monkeypatch: Any) -> None:
    """The charts of other files do not change, so they are left out."""
    for section in ("_charts", "_wire"):
        monkeypatch.setattr(f"frontier_llm.telemetry.report_page.{section}", lambda *_: ())
    draw, draws = figures.memory_figure, [False]
    monkeypatch.setattr(figures, "memory_figure", lambda *a: draw(*a) if draws[0] else "")
    content = json.loads((run / name).read_text())
    seen = set()
    for path, new in edits(content):
        kind = (path[-1] if isinstance(path[-1], str) else path[-2], repr(new))
        if kind in seen:  # the same field of another rank
            continue
        seen.add(kind)
        draws[0] = kind[0] in ("parameters", "peak_bytes", "pipeline", "gradients")
        (run / name).write_text(json.dumps(changed(content, path, new)))
        page = report(run)
        if kind[0] in ("parameters", "pipeline", "stage") and new in (10**400, -1):
            assert f"{name} is damaged" in page


@pytest.mark.exhaustive
def test_every_number_of_a_step_may_be_damaged(run: Path) -> None:
    """The lines are written to one file, because the time of a report is that of its charts."""
    good = (run / METRICS_FILE).read_text()
    rows = [json.dumps(changed(ROW, path, new)) for path, new in edits(ROW)]
    (run / METRICS_FILE).write_text(good + "\n".join(rows) + "\n")
    page = report(run)
    damaged = History.read(run).damaged
    assert len(damaged) > 50
    assert f"{len(damaged)} lines of metrics.jsonl are damaged" in page
    for row in rows[:: len(rows) // 3]:
        (run / METRICS_FILE).write_text(good + row + "\n")
        report(run)


@pytest.mark.parametrize(
    ("line", "is_damaged"),
    [
        (b'{"step": 9, "loss": 1e308}\n', True),
        (b'{"step": 9, "loss": 1' + b"0" * 400 + b"}\n", True),
        (b'{"step": 9, "loss": 1' + b"0" * 9000 + b"}\n", True),
        (b'{"step": -1}\n', True),
        (b'{"step": 9' + b" " * (1 << 23) + b"}\n", True),
        (b"[" * 100_000 + b"\n", True),
        (b"\xff\xfe\n", True),
        (b"\n", True),
        (b'{"step": 9, "lo', False),
        (b'{"step": 9, "loss": null}\n', False),
    ],
)
def test_a_damaged_line_is_counted(line: bytes, is_damaged: bool, run: Path) -> None:
    good = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    (run / METRICS_FILE).write_bytes(b"".join(good[:4]) + line + b"".join(good[4:]))
    if line.endswith(b"\n"):
        assert History.read(run).damaged == ([5] if is_damaged else [])
        assert len(History.read(run)) == 8 + (not is_damaged)
    (run / METRICS_FILE).write_bytes(b"".join(good) + line)
    assert History.read(run).damaged == ([9] if is_damaged else [])


def test_files_that_are_no_files(run: Path) -> None:
    for name in (METRICS_FILE, SUMMARY_FILE, TIMELINE_FILE, "config.yaml"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert "summary.json is damaged" in report(run)


@pytest.mark.exhaustive
def test_many_entries_make_no_heavy_page(run: Path) -> None:
    """As many ranks, kinds of memory and collectives as a file of some megabytes may name."""
    layout = Layout(tensor=1, pipeline=4096, data=64)
    memory = {f"kind {number}": number for number in range(200)}
    ranks = [RankSummary(rank=n, pipeline=n, memory_bytes=memory) for n in range(1000)]
    RunSummary(layout=layout, ranks=ranks).write(run)
    sent = {f"collective {number}": {"node": 1e6} for number in range(3000)}
    with (run / METRICS_FILE).open("a") as file:
        file.write(json.dumps({**ROW, "sent_bytes": sent}) + "\n")
        file.writelines(
            json.dumps({"step": step, "validation_loss": 3.0, "skipped": True}) + "\n"
            for step in range(20, 20_000)
        )
    report(run)


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "blend"}', b'{"event": "blend", "segments": 3}',
        b'{"event": "blend", "segments": []}', b'{"event": "blend", "segments": [{}]}',
        b'{"event": "blend", "segments": [{"first_sample": -1, "weights": {"a": 1}}]}',
        b'{"event": "blend", "segments": [{"first_sample": 0, "weights": {"a": "x"}}]}',
        b'{"event": "blend", "segments": ' + b"[" * 100_000,
        b"3", b"[]", b'"digest"', b'{"digest": 1}', b'{"digest": 1, "step": "x"}', b"\xff",
    ],
)  # fmt: skip
def test_a_damaged_line_of_the_ledger_does_not_count(line: bytes, tmp_path: Path) -> None:
    segments = [{"first_sample": 0, "weights": {"en": 0.5}}]
    ledger = LedgerFile(tmp_path)
    ledger.event("blend", 0, segments=segments)
    ledger.step(4, 0, 8, 15)
    with (tmp_path / LEDGER).open("ab") as file:
        file.write(line + b"\n")
    assert blend_of(tmp_path) == segments
    assert ledger.last_step() == 4


def test_a_ledger_on_a_full_disk_knows_its_last_step(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path)
    ledger.step(3, 0, 8, 15)
    whole = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).unlink()
    (tmp_path / LEDGER).symlink_to("/dev/full")
    ledger.step(4, 8, 8, 15)
    assert ledger.last_step() == 4
    (tmp_path / LEDGER).unlink()
    (tmp_path / LEDGER).write_bytes(whole)
    ledger.step(5, 16, 8, 15)
    steps = [json.loads(line)["step"] for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert steps == [3, 4, 5]
