"""Draw the charts of the pages, docs/images/*.svg.

Charts have mid-grey text and lines on a transparent background, so that they are readable on light
and dark pages. A chart begins with a digest of its data and of the modules that draw it. The digest
tells whether a chart is current without drawing it, because another version of matplotlib draws
other bytes.
"""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "images"
TEXT, GRID = "#768390", "#76839055"
OURS, THEIRS, NEUTRAL, FOURTH = "#2f81f7", "#d97706", "#8b949e", "#1a7f64"
"""Colours of frontier_llm, of other libraries, of neither, and of a fourth series."""


def panels(
    size: tuple[float, float], *titles: str, gap: float = 0.75
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a panel for each title; `gap` is relative to the width of a panel."""
    figure = Figure(figsize=size)
    figure.subplots(1, len(titles))
    figure.subplots_adjust(wspace=gap)
    for axes, title in zip(figure.axes, titles, strict=True):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left")
    return figure, figure.axes


def draw_groups(
    axes: Axes,
    names: Sequence[str],
    series: Mapping[str, tuple[str, Mapping[int, float]]],
    widths: tuple[float, float],
) -> list[BarContainer]:
    """Draw groups of bars, in each group one bar of each series; return the bars by series.

    Args:
        axes: where to draw.
        names: name of each group.
        series: colour and values of each series by its name; a value by the index of its group.
        widths: from a bar to the next one, and of a bar.
    """
    bars = []
    for number, (name, (colour, values)) in enumerate(series.items()):
        shift = widths[0] * (number - (len(series) - 1) / 2)
        positions = [index + shift for index in values]
        heights = list(values.values())
        bars.append(axes.bar(positions, heights, widths[1], color=colour, label=name))
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y")
    return bars


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
        "grid.color": GRID,
        "legend.frameon": False,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
    }
    with matplotlib.rc_context(style):
        buffer = io.StringIO()
        draw().savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
