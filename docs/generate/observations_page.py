"""The charts and the table of docs/observations.md, which the planner predicts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from docs.generate import observations
from docs.generate.blocks import (
    DOCS,
    FOURTH,
    GRID,
    IMAGES,
    NEUTRAL,
    OURS,
    TEXT,
    THEIRS,
    chart,
    filled,
    side_by_side,
)
from docs.generate.observations import Chart, Recomputation

PAGE = DOCS / "observations.md"
LINE_COLOURS = (OURS, THEIRS, FOURTH)
CHARTS: Mapping[str, Callable[[], Chart]] = {
    "tensor": observations.tensor,
    "pipeline": observations.pipeline,
    "micro_batches": observations.micro_batches,
    "chunks": observations.chunks,
    "attention": observations.attention,
}
"""The function that predicts each chart, by the name of its block."""


def files() -> dict[Path, str]:
    """Return the text of the page and of its charts, by their paths."""
    blocks: dict[str, Sequence[str]] = {"memory": observations.memory_table()}
    images = {}
    for name, predicted in CHARTS.items():
        found = predicted()
        images[_image(name)] = _drawn(name, found, partial(draw_lines, found))
        blocks[name] = list(_block(name, _sentence(found)))
    rows = observations.recomputation()
    name = "recomputation"
    images[_image(name)] = _drawn(name, rows, partial(draw_recomputation, rows))
    blocks[name] = list(_block(name, _recomputation_sentence(rows)))
    return {PAGE: filled(PAGE.read_text(), blocks), **images}


def draw_lines(found: Chart) -> Figure:
    """Draw lines over their setting, whose values are spaced logarithmically."""
    figure = Figure(figsize=(6, 2.8))
    (axes,) = side_by_side(figure, 1)
    for (name, line), colour in zip(found.lines.items(), LINE_COLOURS, strict=False):
        axes.plot(list(line), list(line.values()), marker="o", color=colour, label=name)
    values = sorted({value for line in found.lines.values() for value in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(found.label)
    axes.set_ylim(0, 1.1 * max(max(line.values()) for line in found.lines.values()))
    axes.grid(axis="y", color=GRID)
    axes.set_title("predicted percent of the peak", loc="left", color=TEXT)
    axes.legend(frameon=False, labelcolor=TEXT)
    return figure


def draw_recomputation(rows: Sequence[Recomputation]) -> Figure:
    """Draw speed and memory of models without and with recomputation."""
    figure = Figure(figsize=(8.5, 2.8))
    speed, memory = side_by_side(figure, 2, 0.25)
    names = [row.model for row in rows]
    _draw_pairs(speed, names, [row.tokens for row in rows])
    speed.set_yscale("log")
    speed.yaxis.set_major_formatter(ScalarFormatter())
    speed.set_title("tokens/s per GCD (logarithmic)", loc="left", color=TEXT)
    _draw_pairs(memory, names, [row.memory for row in rows])
    memory.set_title("memory per GCD, GiB", loc="left", color=TEXT)
    memory.legend(frameon=False, labelcolor=TEXT, ncols=2)
    return figure


def _draw_pairs(axes: Axes, names: Sequence[str], pairs: Sequence[tuple[float, float]]) -> None:
    """Draw two bars for each model, with their values: without and with recomputation."""
    for side, (label, colour) in enumerate({"kept": OURS, "recomputed": NEUTRAL}.items()):
        positions = [index + 0.4 * (side - 0.5) for index in range(len(names))]
        bars = axes.bar(positions, [pair[side] for pair in pairs], 0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="{:g}", color=TEXT, padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y", color=GRID)
    axes.margins(y=0.4)


def _block(name: str, sentence: str) -> Iterator[str]:
    yield f"![{name.replace('_', ' ')}](images/{_image(name).name})"
    yield ""
    yield sentence


def _sentence(found: Chart) -> str:
    """Say the first and the last value of each line."""
    parts = []
    for name, line in found.lines.items():
        (first, start), *_, (last, end) = line.items()
        parts.append(f"{start:.1f}% at {first} and {end:.1f}% at {last} ({name})")
    return f"Predicted by {found.label}: " + "; ".join(parts) + "."


def _recomputation_sentence(rows: Sequence[Recomputation]) -> str:
    parts = [
        f"{row.tokens[0] / row.tokens[1]:.2f} times as fast with {row.memory[0]:.1f} instead of "
        f"{row.memory[1]:.1f} GiB ({row.model})"
        for row in rows
    ]
    return "Predicted without recomputation: " + "; ".join(parts) + "."


def _image(name: str) -> Path:
    return IMAGES / f"observations_{name}.svg"


def _drawn(name: str, data: Any, draw: Callable[[], Figure]) -> str:
    return chart(_image(name), __file__, json.dumps(data).encode(), draw)
