"""Draw the charts of the report with matplotlib, as SVG elements for an HTML page.

report_page.py and report_sections.py call this module. All charts have one style: a light
background, two main colours, and a unit on every axis.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from frontier_llm.geometry.grid import Level
from frontier_llm.geometry.wire import Sent, level_labels
from frontier_llm.telemetry.history import History
from frontier_llm.units import GIB, KIB, MIB, TIB, format_count

BLUE, ORANGE, INK, GREY = "#2563eb", "#ea580c", "#334155", "#94a3b8"
_LEVEL_COLOURS: dict[Level, str] = {"package": GREY, "node": BLUE, "network": ORANGE}
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
"""Colours of the categories of a stacked bar chart, in order."""
_MAX_POINTS = 600
"""Largest number of points per line. More points cannot be distinguished and enlarge the page."""
_WIDTH_INCHES = 10.8
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
_STYLE = Path(__file__).with_name("charts.mplstyle")
"""Settings of matplotlib for all charts."""


def loss_figure(history: History, initial_validation_loss: float | None, since: int = 0) -> str:
    """Draw training and validation loss over steps; None: the initial one is unknown.

    Validation losses of other samples, up to step `since`, are left out; the initial one is of it.
    """
    with style.context(_STYLE):
        figure, axes = _panels(1, height=3.9)
        ax = axes[0]
        train = history.points("loss")
        ax.plot(*_thinned(train), color=BLUE, alpha=0.35, linewidth=1.0)
        ax.plot(*_thinned(_smoothed(train)), color=BLUE, linewidth=2, label="training (smoothed)")
        validation = [pair for pair in history.points("validation_loss") if pair[0] > since]
        if initial_validation_loss is not None and math.isfinite(initial_validation_loss):
            validation = [(since, initial_validation_loss), *validation]
        if validation:
            x, y = _thinned(validation)
            ax.plot(x, y, "o-", color=ORANGE, markersize=5, linewidth=1.5, label="validation")
            ax.annotate(
                f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(0, 9), textcoords="offset points",
                ha="right", color=ORANGE, weight="bold", bbox=_LABEL_BOX,
            )  # fmt: skip
        _format_step_chart(ax, "Loss", "nats per token")
        if history.skipped:
            steps = history.skipped[:: -(-len(history.skipped) // _MAX_POINTS)]
            ax.plot(  # marks along the lower edge
                steps, [0.015] * len(steps), "|", color=INK, markersize=8,
                transform=ax.get_xaxis_transform(), label="update skipped",
            )  # fmt: skip
        if train or validation or history.skipped:
            ax.legend(loc="upper right")
        return _svg(figure, "loss")


def speed_figure(history: History) -> str:
    """Draw tokens/s of the job and TFLOP/s per device over steps."""
    with style.context(_STYLE):
        figure, (left, right) = _panels(2)
        _line(left, history.points("tokens_per_second"), BLUE)
        _format_step_chart(left, "Throughput of the job", "tokens/s")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short_count(value)))
        _line(right, history.points("model_tflops_per_device"), BLUE, "model")
        hardware = history.points("hardware_tflops_per_device")
        if hardware != history.points("model_tflops_per_device"):
            _line(right, hardware, ORANGE, "hardware (with recomputation)")
            right.legend(loc="lower right")
        _format_step_chart(right, "Speed per device", "TFLOP/s")
        for ax in (left, right):
            ax.set_ylim(bottom=0)
        return _svg(figure, "speed")


def optimizer_figure(history: History) -> str:
    """Draw gradient norm and learning rate over steps."""
    with style.context(_STYLE):
        figure, (left, right) = _panels(2)
        norms = history.points("grad_norm")
        _line(left, norms, BLUE)
        _format_step_chart(left, "Gradient norm before clipping", "norm")
        if norms and min(value for _, value in norms) > 0:
            largest, smallest = (limit(value for _, value in norms) for limit in (max, min))
            if largest > 20 * smallest:
                left.set_yscale("log")
                # matplotlib would label powers of ten in TeX, which "text.parse_math" turns off
                left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _line(right, history.points("learning_rate"), BLUE)
        _format_step_chart(right, "Learning rate", "learning rate")
        right.set_ylim(bottom=0)
        return _svg(figure, "optimizer")


def memory_figure(
    labels: Sequence[str],
    by_category: Mapping[str, Sequence[float]],
    peak_bytes: Sequence[float],
    axis: str,
) -> str:
    """Draw memory by category as stacked bars, and peak memory in a second chart.

    `by_category` has the bytes of each bar for each category. A peak of NaN is unknown.
    """
    with style.context(_STYLE):
        figure, (left, right) = _panels(2, height=3.6)
        positions = range(len(labels))
        bottoms = [0.0] * len(labels)
        sums = [sum(sizes) for sizes in zip(*by_category.values(), strict=True)]
        unit, unit_name = _byte_unit(max(sums, default=0))
        for index, (category, sizes) in enumerate(by_category.items()):
            heights = [size / unit for size in sizes]
            label, color = category.replace("_", " "), CATEGORIES[index % len(CATEGORIES)]
            if not any(sizes):
                continue  # the legend would have a colour that the chart has not
            left.bar(positions, heights, 0.7, bottoms, color=color, label=label)
            bottoms = [sum(pair) for pair in zip(bottoms, heights, strict=True)]
        known = [peak for peak in peak_bytes if math.isfinite(peak)]
        peak_unit, peak_unit_name = _byte_unit(max(known, default=0))
        right.bar(positions, [peak / peak_unit for peak in peak_bytes], 0.7, color=GREY)
        _format_bar_chart(left, labels, "Allocated for the model", unit_name, axis)
        _format_bar_chart(right, labels, "Peak of the device or process", peak_unit_name, axis)
        if by_category:
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=8)
        return _svg(figure, "memory")


def collective_name(name: str) -> str:
    """Return the name of a collective in the report."""
    return "loss and gradient norm" if name == "totals" else name.replace("_", " ")


def wire_figure(sent: Mapping[str, Sent]) -> str:
    """Draw the bytes that all ranks send per step in each collective, by the level of links."""
    names = sorted(sent, key=lambda name: sent[name].total)
    with style.context(_STYLE):
        figure, axes = _panels(1, height=1.2 + 0.3 * len(names))
        ax = axes[0]
        unit, unit_name = _byte_unit(max(sent[name].total for name in names))
        positions, left = range(len(names)), [0.0] * len(names)
        for level, label in level_labels(sent.values()).items():
            widths = [sent[name].at(level) / unit for name in names]
            if not any(widths):
                continue
            ax.barh(positions, widths, 0.62, left, color=_LEVEL_COLOURS[level], label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        ax.set_yticks(positions, list(map(collective_name, names)))
        ax.grid(visible=False, axis="y")
        ax.set_xlim(left=0)
        ax.set_ylim(-0.6, len(names) - 0.4)
        ax.set_xlabel(f"{unit_name} per step, all ranks together")
        figure.legend(loc="outside upper right", ncols=3)
        return _svg(figure, "wire")


def _panels(count: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH_INCHES, height))
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _line(ax: Axes, points: Sequence[tuple[int, float]], color: str, label: str = "") -> None:
    marker = "o" if len(points) < 3 else ""  # a line of one point would be invisible
    ax.plot(*_thinned(points), marker=marker, color=color, linewidth=1.4, label=label)


def _format_step_chart(ax: Axes, title: str, unit: str) -> None:
    """Set title, labels and ticks of a chart with steps on the horizontal axis."""
    ax.set_title(title)
    ax.set_xlabel("step")
    ax.set_ylabel(unit)
    ax.margins(x=0.01)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not any(len(line.get_path()) for line in ax.lines):
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "no finite numbers", transform=ax.transAxes, ha="center", color=INK)


def _format_bar_chart(ax: Axes, labels: Sequence[str], title: str, unit: str, axis: str) -> None:
    """Set title, labels and ticks of a bar chart; of many bars only every n-th has a label."""
    ax.set_title(title)
    ax.set_ylabel(unit)
    ax.set_xlabel(axis)
    interval = -(-len(labels) // 16)
    ax.set_xticks(range(0, len(labels), interval), list(labels)[::interval])
    ax.grid(visible=False, axis="x")


def _smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Replace each value by the mean over a centred window of 1/50 of the points.

    The window is shorter near both ends of the line, so that it remains centred.
    """
    half_window = len(points) // 100
    sums = list(accumulate((value for _, value in points), initial=0.0))
    smooth = []
    for index, (step, _) in enumerate(points):
        half = min(half_window, index, len(points) - 1 - index)
        start, stop = index - half, index + half + 1
        smooth.append((step, (sums[stop] - sums[start]) / (stop - start)))
    return smooth


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Average neighbouring points so that at most `_MAX_POINTS` remain."""
    size = -(-len(points) // _MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    x = [sum(step for step, _ in group) / len(group) for group in groups]
    y = [sum(value for _, value in group) / len(group) for group in groups]
    return x, y


def _short_count(value: float) -> str:
    """Return the label of a number on an axis: `12k`, `2.5M`, `0`."""
    text = format_count(value)
    if not text[-1].isalpha():
        return text
    return f"{float(text[:-1]):g}{text[-1]}"


def _byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit for a chart whose largest value is `largest` bytes: its size and name."""
    for size, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest >= size:
            return size, name
    return 1, "bytes"


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element, whose ids begin with `name` to be unique on the page."""
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
