"""The style of the charts: mid-grey text and lines on a transparent background.

They are readable on light and dark pages. A chart begins with a digest of its data and of the
modules that draw it. The digest tells whether a chart is current without drawing it, because
another version of matplotlib draws other bytes.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TEXT, GRID = "#768390", "#76839055"
OURS, THEIRS, NEUTRAL, FOURTH = "#2f81f7", "#d97706", "#8b949e", "#1a7f64"
"""Colours of frontier_llm, of other libraries, of neither, and of a fourth series."""


def side_by_side(figure: Figure, number: int, gap: float = 0.75) -> list[Axes]:
    """Divide a figure into panels side by side; `gap` is relative to the width of a panel."""
    figure.subplots(1, number)
    figure.subplots_adjust(wspace=gap)
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_axisbelow(True)
    return list(figure.axes)


def svg(draw: Callable[[], Figure], digest: str) -> str:
    """Draw a chart in this style; return the content of its SVG file, with a digest in it."""
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
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    text = re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
    return text.replace("<svg ", f"{digest}\n<svg ", 1)


def digest_comment(module: str, data: Iterable[bytes]) -> str:
    """Return the comment with a digest of a chart's data, of this module and of the drawing module.

    Args:
        module: file of the module that draws the chart.
        data: the data of the chart.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for part in (Path(module).read_bytes(), *data):
        digest.update(part)
    return f"<!-- sha256 of data and drawing: {digest.hexdigest()} -->"
