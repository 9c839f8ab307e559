"""Blocks of pages that are generated, and the measurements that they are made of.

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->`. The text around these
markers is written by hand and is not changed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = Mapping[str, Any]
"""One measurement: a row of a JSON file with its keys."""
Lines = Callable[[], Iterable[str]]
"""Makes the lines of a block."""


def filled(text: str, blocks: Mapping[str, Iterable[str]]) -> str:
    """Return a page with new lines in its blocks, by the name in their markers.

    Raises:
        ValueError: a marker is missing.
    """
    for name, lines in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the markers of {name} are missing")
        text = "".join([before, begin, *(f"{line}\n" for line in lines), end, after])
    return text


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def headed(*head: str) -> Callable[[Callable[[], Iterable[Iterable[object]]]], Lines]:
    """Turn a function that yields rows into one that yields a table with these headings."""

    def with_head(rows: Callable[[], Iterable[Iterable[object]]]) -> Lines:
        return wraps(rows)(lambda: table(head, rows()))

    return with_head


def load(name: str) -> Mapping[str, Any]:
    """Return the content of benchmarks/results/NAME.json."""
    content: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def select(rows: Sequence[Row], **conditions: object) -> list[Row]:
    """Return the rows that have the given values, for example `link="loopback"`."""
    return [row for row in rows if all(row[key] == value for key, value in conditions.items())]


def sharding_case(machine: int, **conditions: object) -> Mapping[str, Row]:
    """Return the rows of the first case of sharding.json with the given values, by contender.

    A case has the rows of all contenders under the same conditions: ranks, precision and link.
    Machine 0 is the AMD processor, 1 the Intel processor.

    Raises:
        ValueError: no case has these values.
    """
    cases = select(load("sharding")["machines"][machine]["cases"], **conditions)
    if not cases:
        raise ValueError(f"sharding.json, machine {machine}: no case with {conditions}")
    return {row["contender"]: row for row in cases[0]["rows"]}
