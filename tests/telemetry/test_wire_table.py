"""The report's table of what is sent says what quantisation saved."""

import json
from pathlib import Path

from frontier_llm.telemetry.report_page import make_report


def write_steps(folder: Path, unquantised: dict) -> None:
    sent = {
        "reduce_grads": {"package": 0.0, "node": 2048.0, "network": 1024.0},
        "tensor": {"package": 0.0, "node": 512.0, "network": 0.0},
    }
    rows = [
        {"step": step, "loss": 2.0, "sent_bytes": sent, "unquantised_bytes": unquantised}
        for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def cells(page: str, first: str) -> str:
    """Return the row of the table that begins so, without tags."""
    row = page[page.index(f"<td>{first}</td>") :]
    return row[: row.index("</tr>")].replace("</td>", " ").replace("<td>", "")


def test_what_was_saved_is_said_by_collective_and_in_all(tmp_path):
    write_steps(tmp_path, {"reduce_grads": {"package": 0.0, "node": 4096.0, "network": 8192.0}})
    page = make_report(tmp_path)
    assert "Saved between nodes" in page
    assert cells(page, "reduce grads").split()[-3:] == ["12.00", "KiB", "8.0x"]
    assert cells(page, "tensor").split()[-2:] == ["512", "B"], "nothing between nodes"


def test_without_quantisation_the_table_says_nothing_of_it(tmp_path):
    write_steps(tmp_path, {})
    assert "Unquantised" not in make_report(tmp_path)
