"""Write the table of the README that compares frontier_llm with other projects.

`python -m docs.generate.comparison_page` reports whether the table is out of date, and `--write`
writes it. The features come from features.yaml, where each cell names its source. The speeds are
ratios of the measured tokens per second in benchmarks/results/sharding.json.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from docs.generate.marked_page import filled, keep_current
from frontier_llm.cli.options import run_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "README.md"
FEATURES = Path(__file__).with_name("features.yaml")
RESULTS = ROOT / "benchmarks" / "results" / "sharding.json"
SIGNS = {True: "✓", False: "✗", "?": ""}
"""Signs for yes, no and unknown; a cell is empty if no source answers the question."""
LINKS = ("loopback", "1 Gbit/s")
RANKS, PRECISION = 2, "bf16"
"""Conditions of the measurements that are shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or report whether it is out of date; return the exit code."""
    return keep_current(__doc__, "docs.generate.comparison_page", arguments, files)


def files() -> dict[Path, str]:
    """Return the page with a new table."""
    return {PAGE: filled(PAGE.read_text(), {"comparison": table()})}


def table() -> Iterator[str]:
    """Yield the table: a row per feature, then a row per measured speed."""
    features = read_features()
    peers: list[str] = features["peers"]
    yield "| | frontier_llm | " + " | ".join(peers) + " |"
    yield "|---|" + ":-:|" * (len(peers) + 1)
    for row in features["rows"]:
        yield _row(row["feature"], [_cell(row["ours"]), *(_cell(row[peer]) for peer in peers)])
    for speed in features["speeds"]:
        for link in LINKS:
            ratios = {
                peer: _ratio(speed["ours"], name, link) for peer, name in speed["peers"].items()
            }
            name = f"tokens/s of frontier_llm divided by theirs: {speed['what']}, {link}"
            yield _row(name, ["1", *(ratios.get(peer, "") for peer in peers)])


def read_features() -> Mapping[str, Any]:
    """Read features.yaml.

    Raises:
        ValueError: a cell with an answer names no source.
    """
    features: Mapping[str, Any] = yaml.safe_load(FEATURES.read_text())
    for row in features["rows"]:
        for column in ("ours", *features["peers"]):
            cell = row[column]
            if cell["is"] != "?" and not cell.get("source"):
                raise ValueError(f"{FEATURES.name}: {row['feature']}, {column}: no source")
    return features


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _cell(cell: Mapping[str, Any]) -> str:
    content = cell["is"]
    return SIGNS[content] if content in SIGNS else str(content)


def _ratio(ours: str, theirs: str, link: str) -> str:
    """Return the ratio of two median speeds: the median over runs, weighted by their rounds."""
    ratios = []
    for case in json.loads(RESULTS.read_text())["machines"][0]["cases"]:
        if (case["ranks"], case["precision"], case["link"]) != (RANKS, PRECISION, link):
            continue
        speeds = {row["contender"]: row["tokens_per_second"] for row in case["rows"]}
        if ours in speeds and theirs in speeds:
            ratios += [speeds[ours] / speeds[theirs]] * case["rounds"]
    if not ratios:
        raise ValueError(
            f"{RESULTS.name}: no case in which {ours} and {theirs} were both measured on {link}"
        )
    return f"{median(ratios):.2f}"


if __name__ == "__main__":
    sys.exit(run_command(main))
