"""Read the measurements in benchmarks/results, from which charts and tables are made."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = Mapping[str, Any]
"""One measurement: a row of the JSON file with its keys."""


def load(name: str) -> Mapping[str, Any]:
    """Return the content of benchmarks/results/NAME.json."""
    content: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def sharding_case(machine: int, **conditions: object) -> Mapping[str, Row]:
    """Return the rows of one case of sharding.json, by contender.

    A case has the rows of all contenders under the same conditions: ranks, precision and link.

    Args:
        machine: index into `machines`: 0 is the AMD processor, 1 the Intel processor.
        conditions: values that the case must have, for example `precision="bf16"`. If several cases
            have these values, the first one is returned.

    Raises:
        ValueError: no case has these values.
    """
    for case in load("sharding")["machines"][machine]["cases"]:
        if all(case[key] == value for key, value in conditions.items()):
            return {row["contender"]: row for row in case["rows"]}
    raise ValueError(f"sharding.json, machine {machine}: no case with {conditions}")


def select(rows: Sequence[Row], **conditions: object) -> list[Row]:
    """Return the rows that have the given values, for example `link="loopback"`."""
    return [row for row in rows if all(row[key] == value for key, value in conditions.items())]
