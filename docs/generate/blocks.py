"""Blocks of pages and charts that are generated, and the measurements that they are made of.

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->`. The text around these
markers is written by hand and is not changed.

Charts have mid-grey text and lines on a transparent background, so that they are readable on light
and dark pages. A chart begins with a digest of its data and of the modules that draw it. The digest
tells whether a chart is current without drawing it, because another version of matplotlib draws
other bytes.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
DOCS, IMAGES = ROOT / "docs", ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
TEXT, GRID = "#768390", "#76839055"
OURS, THEIRS, NEUTRAL, FOURTH = "#2f81f7", "#d97706", "#8b949e", "#1a7f64"
"""Colours of frontier_llm, of other libraries, of neither, and of a fourth series."""
Row = Mapping[str, Any]
"""One measurement: a row of a JSON file with its keys."""


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


def side_by_side(figure: Figure, number: int, gap: float = 0.75) -> list[Axes]:
    """Divide a figure into panels side by side; `gap` is relative to the width of a panel."""
    figure.subplots(1, number)
    figure.subplots_adjust(wspace=gap)
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_axisbelow(True)
    return list(figure.axes)


def chart(file: Path, module: str, data: bytes, draw: Callable[[], Figure]) -> str:
    """Return the content of a chart's file if it shows these data, or else a new chart.

    `module` is the file of the module that draws it.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for part in (Path(module).read_bytes(), data):
        digest.update(part)
    comment = f"<!-- sha256 of data and drawing: {digest.hexdigest()} -->"
    if file.exists() and comment in (content := file.read_text()):
        return content
    return svg(draw).replace("<svg ", f"{comment}\n<svg ", 1)


def svg(draw: Callable[[], Figure]) -> str:
    """Draw a chart; return the content of its SVG file."""
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "frontier_llm",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": GRID,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
    }
    with matplotlib.rc_context(style):
        buffer = io.StringIO()
        draw().savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
