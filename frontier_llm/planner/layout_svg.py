"""Draw the sharding of model states as SVG: one row per data rank, one box per node.

`frontier-llm explain-layout --svg FILE` writes this drawing.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from frontier_llm.geometry.partition import DIGITS, Interval
from frontier_llm.planner.state_layout import StateLayout

MOST_RANKS = 64
"""Number of data ranks that are drawn at most."""
ROW, GAP, TOP, MARGIN = 22, 14, 96, 16
"""Height of a row, gap between nodes, top of the first row, and outer margin, in pixels."""
LABELS, BAR, BETWEEN = 168, 220, 26
"""Width of the labels, of a bar, and of the space between two bars, in pixels."""
FONT = "font-family='Helvetica, Arial, sans-serif'"


class _State(NamedTuple):
    """A column of the drawing: one kind of model state."""

    title: str
    colour: str
    """Colour of the part that a rank stores."""
    background: str
    """Colour of the whole buffer."""


STATES = (
    _State("parameters", "#2f6db5", "#e4edf7"),
    _State("gradients", "#c8780a", "#faeeda"),
    _State("optimizer states", "#2c8a4b", "#e1f2e7"),
)


def draw(layout: StateLayout) -> str:
    """Draw which part of a flat buffer each data rank stores; at most 64 ranks are drawn."""
    ranks = range(min(layout.factors.data, MOST_RANKS))
    nodes = [list(members) for _, members in groupby(ranks, layout.node)]
    height = TOP + len(ranks) * ROW + len(nodes) * GAP + MARGIN
    width = MARGIN + LABELS + 3 * (BAR + BETWEEN)
    body = [*_heading(layout), *_nodes(layout, nodes, width)]
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' {FONT}>",
            f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
            *body,
            "</svg>",
            "",
        ]
    )


def _heading(layout: StateLayout) -> Iterator[str]:
    factors = layout.factors
    numbers = (factors.params, factors.grads, factors.optimizer)
    yield _text(
        MARGIN,
        28,
        f"Parts of one flat buffer that each of {factors.data} data ranks stores",
        "font-size='16' font-weight='bold' fill='#222222'",
    )
    subtitle = f"{factors.data // factors.optimizer} replicas of all states; a box is a node"
    yield _text(MARGIN, 48, subtitle, "font-size='12' fill='#555555'")
    yield _text(MARGIN + 8, TOP - 12, "rank", "font-size='12' fill='#555555'")
    for index, digit in enumerate(DIGITS):
        yield _text(MARGIN + 64 + 24 * index, TOP - 12, digit[0], "font-size='12' fill='#555555'")
    for column, (state, factor) in enumerate(zip(STATES, numbers, strict=True)):
        title = f"{state.title} over {factor} rank{'s' * (factor > 1)}"
        style = f"font-size='13' font-weight='bold' fill='{state.colour}'"
        yield _text(_left(column), TOP - 12, title, style)


def _nodes(layout: StateLayout, nodes: list[list[int]], width: int) -> Iterator[str]:
    top = TOP
    for members in nodes:
        height = len(members) * ROW + 6
        yield (
            f"<rect x='{MARGIN}' y='{top - 3}' width='{width - 2 * MARGIN}' height='{height}' "
            "rx='5' fill='none' stroke='#999999'/>"
        )
        for rank in members:
            yield from _row(layout, rank, top)
            top += ROW
        top += GAP


def _row(layout: StateLayout, rank: int, top: int) -> Iterator[str]:
    factors = layout.factors
    size = factors.padded(1)
    baseline = top + 15
    yield _text(MARGIN + 8, baseline, str(rank), "font-size='12' fill='#222222'")
    for index, digit in enumerate(factors.digits(rank)):
        yield _text(MARGIN + 64 + 24 * index, baseline, str(digit), "font-size='12' fill='#222222'")
    intervals = (
        factors.params_interval(size, rank),
        factors.grads_interval(size, rank),
        factors.optimizer_interval(size, rank),
    )
    for column, (state, interval) in enumerate(zip(STATES, intervals, strict=True)):
        yield from _bar(_left(column), top + 3, state, interval, size)


def _bar(left: float, top: int, state: _State, interval: Interval, size: int) -> Iterator[str]:
    start, length = interval.start * BAR / size, interval.length * BAR / size
    box = f"y='{top}' height='{ROW - 6}' rx='2'"
    yield f"<rect x='{left}' {box} width='{BAR}' fill='{state.background}'/>"
    yield (
        f"<rect x='{left + start:.2f}' {box} width='{max(length, 1.5):.2f}' fill='{state.colour}'/>"
    )


def _left(column: int) -> int:
    return MARGIN + LABELS + column * (BAR + BETWEEN)


def _text(left: float, baseline: float, words: str, style: str) -> str:
    return f"<text x='{left}' y='{baseline}' {style}>{words}</text>"
