"""The charts of the report, drawn by matplotlib as SVG elements.

All charts share one style: a light background, two main colours, units on every axis.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from frontier_llm.geometry.wire import Sent
from frontier_llm.telemetry.history import History
from frontier_llm.units import GIB, KIB, MIB, TIB, format_count

BLUE, ORANGE, INK, GREY = "#2563eb", "#ea580c", "#334155", "#94a3b8"
CATEGORIES = (
    "#2563eb",
    "#0891b2",
    "#16a34a",
    "#ca8a04",
    "#ea580c",
    "#be185d",
    "#7c3aed",
    "#64748b",
)
"""Colours of the categories in a stacked chart."""
_MOST_POINTS = 600
"""Largest number of points per line: more cannot be distinguished and would enlarge the page."""
_WIDTH_INCHES = 10.8
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlecolor": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "text.parse_math": False,
}


def loss_figure(history: History, initial_validation_loss: float | None) -> str:
    """Draw training and validation loss over steps."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(1, height=3.9)
        ax = axes[0]
        train = history.points("loss")
        ax.plot(*_thinned(train), color=BLUE, alpha=0.35, linewidth=1.0)
        ax.plot(*_thinned(_smoothed(train)), color=BLUE, linewidth=2, label="training (smoothed)")
        validation = history.points("validation_loss")
        if initial_validation_loss is not None and math.isfinite(initial_validation_loss):
            validation = [(0, initial_validation_loss), *validation]
        if validation:
            x, y = zip(*validation, strict=True)
            ax.plot(x, y, "o-", color=ORANGE, markersize=5, linewidth=1.5, label="validation")
            ax.annotate(
                f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(0, 9), textcoords="offset points",
                ha="right", color=ORANGE, weight="bold", bbox=_LABEL_BOX,
            )  # fmt: skip
        _over_steps(ax, "Loss", "nats per token")
        if history.skipped:
            _rug(ax, history.skipped)
        if train or validation or history.skipped:
            ax.legend(loc="upper right")
        return _svg(figure, "loss")


def speed_figure(history: History) -> str:
    """Draw tokens/s of the job and TFLOP/s per device over steps."""
    with matplotlib.rc_context(_STYLE):
        figure, (left, right) = _panels(2)
        _line(left, history.points("tokens_per_second"), BLUE)
        _over_steps(left, "Throughput of the job", "tokens/s")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short_count(value)))
        _line(right, history.points("model_tflops_per_device"), BLUE, "model")
        if history.points("hardware_tflops_per_device") != history.points(
            "model_tflops_per_device"
        ):
            hardware = history.points("hardware_tflops_per_device")
            _line(right, hardware, ORANGE, "hardware (with recomputation)")
            right.legend(loc="lower right")
        _over_steps(right, "Speed per device", "TFLOP/s")
        for ax in (left, right):
            ax.set_ylim(bottom=0)
        return _svg(figure, "speed")


def optimizer_figure(history: History) -> str:
    """Draw gradient norm and learning rate over steps."""
    with matplotlib.rc_context(_STYLE):
        figure, (left, right) = _panels(2)
        norms = history.points("grad_norm")
        _line(left, norms, BLUE)
        _over_steps(left, "Gradient norm before clipping", "norm")
        if norms and min(value for _, value in norms) > 0:
            largest, smallest = (limit(value for _, value in norms) for limit in (max, min))
            if largest > 20 * smallest:
                left.set_yscale("log")
                # matplotlib's own labels of powers of ten are TeX, which is not parsed here
                left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _line(right, history.points("learning_rate"), BLUE)
        _over_steps(right, "Learning rate", "learning rate")
        right.set_ylim(bottom=0)
        return _svg(figure, "optimizer")


def memory_figure(
    labels: Sequence[str],
    by_category: Mapping[str, Sequence[float]],
    peak_bytes: Sequence[float],
    axis: str,
) -> str:
    """Draw memory by category as stacked bars, and peak memory in a second chart.

    Args:
        labels: labels of the bars.
        by_category: bytes of each category, one number per bar.
        peak_bytes: peak memory, one number per bar; NaN = unknown.
        axis: label of the horizontal axis.
    """
    with matplotlib.rc_context(_STYLE):
        figure, (left, right) = _panels(2, height=3.6)
        places = range(len(labels))
        stack = [0.0] * len(labels)
        sums = [sum(column) for column in zip(*by_category.values(), strict=True)]
        unit, suffix = _byte_unit(max(sums, default=0))
        for index, (category, sizes) in enumerate(by_category.items()):
            heights = [size / unit for size in sizes]
            color = CATEGORIES[index % len(CATEGORIES)]
            left.bar(places, heights, 0.7, stack, color=color, label=category.replace("_", " "))
            stack = [a + b for a, b in zip(stack, heights, strict=True)]
        known = [peak for peak in peak_bytes if math.isfinite(peak)]
        peak_unit, peak_suffix = _byte_unit(max(known, default=0))
        right.bar(places, [peak / peak_unit for peak in peak_bytes], 0.7, color=GREY)
        _over_bars(left, labels, "Allocated for the model", suffix, axis)
        _over_bars(right, labels, "Peak of the device or process", peak_suffix, axis)
        if by_category:
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=8)
        return _svg(figure, "memory")


def wire_figure(sent: Mapping[str, Sent]) -> str:
    """Draw bytes per step by collective, inside nodes and between nodes."""
    names = sorted(sent, key=lambda name: sent[name].intra + sent[name].inter)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(1, height=1.2 + 0.3 * len(names))
        ax = axes[0]
        unit, suffix = _byte_unit(max(sent[name].intra + sent[name].inter for name in names))
        intra = [sent[name].intra / unit for name in names]
        inter = [sent[name].inter / unit for name in names]
        places = range(len(names))
        ax.barh(places, intra, 0.62, color=BLUE, label="inside a node")
        ax.barh(places, inter, 0.62, intra, color=ORANGE, label="between nodes")
        ax.set_yticks(places, [name.replace("_", " ") for name in names])
        ax.grid(visible=False, axis="y")
        ax.set_xlim(left=0)
        ax.set_ylim(-0.6, len(names) - 0.4)
        ax.set_xlabel(f"{suffix} per step, all ranks together")
        figure.legend(loc="outside upper right", ncols=2)
        return _svg(figure, "wire")


def _panels(count: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH_INCHES, height))
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _line(ax: Axes, points: Sequence[tuple[int, float]], color: str, label: str = "") -> None:
    marker = "o" if len(points) < 3 else ""
    ax.plot(*_thinned(points), marker=marker, color=color, linewidth=1.4, label=label)


def _rug(ax: Axes, steps: Sequence[int]) -> None:
    """Mark steps along the lower edge of a chart."""
    ax.plot(
        steps, [0.015] * len(steps), "|", color=INK, markersize=8,
        transform=ax.get_xaxis_transform(), label="update skipped",
    )  # fmt: skip


def _over_steps(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title)
    ax.set_xlabel("step")
    ax.set_ylabel(unit)
    ax.margins(x=0.01)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not any(len(line.get_path()) for line in ax.lines):
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "no finite numbers", transform=ax.transAxes, ha="center", color=INK)


def _over_bars(ax: Axes, labels: Sequence[str], title: str, suffix: str, axis: str) -> None:
    ax.set_title(title)
    ax.set_ylabel(suffix)
    ax.set_xlabel(axis)
    every = -(-len(labels) // 16)
    ax.set_xticks(range(0, len(labels), every), list(labels)[::every])
    ax.grid(visible=False, axis="x")


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Average over a centred window of 1/50 of the points."""
    half = len(points) // 100
    sums = list(accumulate((value for _, value in points), initial=0.0))
    smooth = []
    for index, (step, _) in enumerate(points):
        # the window stays symmetric, so that the ends of the line do not bend
        reach = min(half, index, len(points) - 1 - index)
        start, stop = index - reach, index + reach + 1
        smooth.append((step, (sums[stop] - sums[start]) / (stop - start)))
    return smooth


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Average neighbouring points so that at most `_MOST_POINTS` are left; return x and y."""
    size = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    x = [sum(step for step, _ in group) / len(group) for group in groups]
    y = [sum(value for _, value in group) / len(group) for group in groups]
    return x, y


def _short_count(value: float) -> str:
    """Return the label of a number on an axis: `12k`, `2.5M`, `0`."""
    words = format_count(value)
    if not words[-1].isalpha():
        return words
    return f"{float(words[:-1]):g}{words[-1]}"


def _byte_unit(largest: float) -> tuple[float, str]:
    for size, suffix in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest >= size:
            return size, suffix
    return 1, "bytes"


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element whose ids are unique on the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        r'<svg xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg" \1'
        f' role="img" aria-label="{name}">',
        text,
        count=1,
    )
