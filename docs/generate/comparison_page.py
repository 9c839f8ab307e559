"""The table of the README that compares frontier_llm with other projects.

The features come from features.yaml, where each cell names its source. The speeds are
ratios of the measured tokens per second in benchmarks/results/sharding.json.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from docs.generate.blocks import load, select, table

FEATURES = Path(__file__).with_name("features.yaml")
SIGNS = {True: "✓", False: "✗", "?": ""}
"""Signs for yes, no and unknown; a cell is empty if no source answers the question."""
LINKS = ("loopback", "1 Gbit/s")
RANKS, PRECISION = 2, "bf16"
"""Conditions of the measurements that are shown."""


def comparison() -> Iterator[str]:
    """Yield the table: a row per feature, then a row per measured speed."""
    features = read_features()
    peers: list[str] = features["peers"]
    rows: list[list[str]] = [
        [row["feature"], *(_cell(row[name]) for name in ("ours", *peers))]
        for row in features["rows"]
    ]
    for speed in features["speeds"]:
        for link in LINKS:
            ratios = {
                peer: _ratio(speed["ours"], name, link) for peer, name in speed["peers"].items()
            }
            name = f"tokens/s of frontier_llm divided by theirs: {speed['what']}, {link}"
            rows.append([name, "1", *(ratios.get(peer, "") for peer in peers)])
    head, _, *lines = table(("", "frontier_llm", *peers), rows)
    yield head.replace("|  |", "| |", 1)
    yield "|---|" + ":-:|" * (len(peers) + 1)
    yield from lines


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


def _cell(cell: Mapping[str, Any]) -> str:
    content = cell["is"]
    return SIGNS[content] if content in SIGNS else str(content)


def _ratio(ours: str, theirs: str, link: str) -> str:
    """Return the ratio of two median speeds: the median over runs, weighted by their rounds."""
    cases = select(
        load("sharding")["machines"][0]["cases"], ranks=RANKS, precision=PRECISION, link=link
    )
    ratios = []
    for case in cases:
        speeds = {row["contender"]: row["tokens_per_second"] for row in case["rows"]}
        if ours in speeds and theirs in speeds:
            ratios += [speeds[ours] / speeds[theirs]] * case["rounds"]
    if not ratios:
        raise ValueError(f"sharding.json: {ours} and {theirs} were never both measured on {link}")
    return f"{median(ratios):.2f}"


PAGES = {"README.md": {"comparison": comparison}}
