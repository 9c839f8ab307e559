"""The charts of measured figures: docs/images/*.svg from benchmarks/results/*.json."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.generate.blocks import RESULTS, Row, load, select, sharding_case
from docs.generate.drawing import (
    FOURTH,
    IMAGES,
    NEUTRAL,
    OURS,
    TEXT,
    THEIRS,
    chart,
    draw_groups,
    panels,
)

PEERS = ("ddp", "fsdp", "deepspeed-zero1", "deepspeed-zero3")
FORMAT_COLOURS = {"fp32": NEUTRAL, "bf16": THEIRS, "int8": OURS, "int4": FOURTH}
SCHEDULE_COLOURS = {
    "megatron-1f1b": "#d97706", "1f1b": "#8b949e", "zb_h1": "#9cc8ff",
    "megatron-interleaved": "#f0b866", "interleaved": "#2f81f7", "interleaved-waiting": "#1f5fbf",
    "zb_v": "#1a7f64",
}  # fmt: skip
"""The schedules that the chart of pipelines shows, with the colours of their bars."""


def images() -> dict[Path, str]:
    """Return the charts of `CHARTS`."""
    return {
        file: chart(file, __file__, (RESULTS / f"{source}.json").read_bytes(), draw)
        for name, (source, draw) in CHARTS.items()
        for file in [IMAGES / f"{name}.svg"]
    }


def sharding() -> Figure:
    """Draw tokens per second of the contenders on loopback and on a 1 Gbit/s link."""
    contenders = {
        "loopback": ("ours-replicated", "ours-zero1", "ours-zero3", *PEERS),
        "1 Gbit/s": ("ours-zero1", "ours-zero3", "ours-zeropp+zeropp", *PEERS),
    }
    figure, both = panels((9, 3.2), *(f"{link}: tokens/s" for link in contenders))
    for axes, (link, names) in zip(both, contenders.items(), strict=True):
        _draw_speeds(axes, names, sharding_case(0, ranks=2, precision="bf16", link=link))
    return figure


def quantised_step() -> Figure:
    """Draw tokens per second with and without quantised communication over two links."""
    names = ("ours-zero3", "ours-zero3+zeropp", "ours-zeropp+zeropp", "fsdp", "deepspeed-zero3")
    links = ("1 Gbit/s", "200 Mbit/s")
    figure, both = panels((9, 2.6), *(f"{link}, fp32: tokens/s" for link in links))
    for axes, link in zip(both, links, strict=True):
        _draw_speeds(axes, names, sharding_case(0, ranks=2, precision="fp32", link=link))
    return figure


def checkpoint() -> Figure:
    """Draw how long a save blocks training, and when it is durable."""
    rows = [row for row in load("checkpoint")["rows"] if row["saver"] != "bare-writes"]
    names = [row["saver"] for row in rows]
    titles = ("training is blocked (logarithmic)", "until the checkpoint is durable")
    figure, (blocked, durable) = panels((9, 2.8), *titles)
    _draw_bars(blocked, names, [row["blocked_ms"] for row in rows], "{:g} ms")
    blocked.set_xscale("log")
    blocked.set_xlim(0.5, 5000)
    _draw_bars(durable, names, [row["durable_s"] or 0 for row in rows], "{:g} s", zero="never")
    return figure


def collectives() -> Figure:
    """Draw the speed of gathers and reductions relative to bf16, by format and link."""
    rows = select(load("collectives")["rows"], nodes_x_ranks="2 x 1")
    links, flows = ("loopback", "1 Gbit/s", "200 Mbit/s"), ("gather", "reduce")
    figure, both = panels((9, 2.8), *(f"{flow}: speed over bf16" for flow in flows), gap=0.2)
    for axes, flow in zip(both, flows, strict=True):
        series = {}
        for name, colour in FORMAT_COLOURS.items():
            by_link = [select(rows, flow=flow, format=name, link=link)[0] for link in links]
            values = [row["times_as_fast_as_bf16"] for row in by_link]
            series[name] = colour, dict(enumerate(values))
        draw_groups(axes, links, series, (0.2, 0.18))
    both[0].legend()
    return figure


def pipeline() -> Figure:
    """Draw the times of pipeline schedules relative to our 1F1B, by number of micro-batches."""
    cases = load("pipeline")["cases"]
    numbers_of_ranks = sorted({case["ranks"] for case in cases})
    titles = (f"{ranks} ranks: time over 1f1b" for ranks in numbers_of_ranks)
    figure, all_axes = panels((9, 3.2), *titles, gap=0.15)
    for axes, ranks in zip(all_axes, numbers_of_ranks, strict=True):
        of_ranks = select(cases, ranks=ranks)
        series = {}
        for name, colour in SCHEDULE_COLOURS.items():
            series[name] = (
                colour,
                {
                    index: row["over_1f1b"]
                    for index, case in enumerate(of_ranks)
                    for row in select(case["rows"], contender=name)
                },
            )
        draw_groups(axes, [str(case["micro_batches"]) for case in of_ranks], series, (0.11, 0.1))
        axes.set_xlabel("micro-batches")
        axes.set_ylim(bottom=0.5)
    handles = all_axes[0].get_legend_handles_labels()
    figure.legend(*handles, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.22))
    return figure


def faults() -> Figure:
    """Draw, for each fault, the seconds until Slurm has the nodes back."""
    rows = load("faults")["rows"]
    names = [row["fault"].replace("`", "") for row in rows]
    figure, (axes,) = panels((7, 3.6), "seconds from the fault until the nodes are free")
    _draw_bars(axes, names, [_seconds(row["nodes_free_after"]) for row in rows], "{:.3g} s")
    return figure


def _draw_speeds(axes: Axes, names: Sequence[str], by_name: Mapping[str, Row]) -> None:
    """Draw median tokens per second as bars, with a line from the slowest to the fastest round."""
    rows = [by_name[name] for name in names]
    speeds = [row["tokens_per_second"] for row in rows]
    _draw_bars(axes, names, speeds, ends=[row["most"] for row in rows])
    below = [speed - row["least"] for speed, row in zip(speeds, rows, strict=True)]
    above = [row["most"] - speed for speed, row in zip(speeds, rows, strict=True)]
    axes.errorbar(speeds, range(len(rows)), xerr=[below, above], fmt="none", ecolor=TEXT, lw=1)


def _draw_bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    form: str = "{:g}",
    zero: str = "0",
    ends: Sequence[float] = (),
) -> None:
    """Draw horizontal bars with their values, the first at the top; those of frontier_llm are blue.

    Args:
        axes: where to draw.
        names: name of each bar.
        values: value of each bar.
        form: format string of a value.
        zero: text for a value of 0.
        ends: x coordinate at which the text of each bar begins; empty: at the end of the bar.
    """
    colours = [THEIRS if name.startswith(_OTHER_LIBRARIES) else OURS for name in names]
    axes.barh(range(len(names)), values, color=colours, height=0.68)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.margins(x=0.22)
    for position, (value, end) in enumerate(zip(values, ends or values, strict=True)):
        text = form.format(value) if value else zero
        axes.annotate(text, (end, position), (5, 0), textcoords="offset points", va="center")


def _seconds(text: str) -> float:
    """Return the seconds of a figure such as `28 ms` or `13.1 s`."""
    number, unit = text.split()
    return float(number) / (1000 if unit == "ms" else 1)


_OTHER_LIBRARIES = ("ddp", "fsdp", "deepspeed", "torch", "dcp")
CHARTS: Mapping[str, tuple[str, Callable[[], Figure]]] = {
    "sharding_speed": ("sharding", sharding),
    "quantised_step": ("sharding", quantised_step),
    "checkpoint_time": ("checkpoint", checkpoint),
    "collectives_speed": ("collectives", collectives),
    "pipeline_schedules": ("pipeline", pipeline),
    "faults": ("faults", faults),
}
"""For each chart, by the name of its file: the results it shows, and the function that draws it."""
