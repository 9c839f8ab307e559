"""Make four sections of the report (report_page.py).

They show the layout of ranks, the memory of each rank, the planner's predictions beside the run's
measurements, and the passes of a pipeline.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.telemetry import figures, html_page
from frontier_llm.telemetry.html_page import UNKNOWN, element
from frontier_llm.telemetry.pipeline_picture import draw
from frontier_llm.telemetry.step_timeline import RECORDED_ACTIONS, StepTimeline
from frontier_llm.telemetry.summary import Layout, PlanRow, RankSummary, RunSummary
from frontier_llm.units import counted, format_bytes, format_seconds

BOUNDED = ("gathered", "messages")
"""Categories of memory for which the prediction is an upper bound. For others it is exact."""

_MAX_BARS = 128
"""Largest number of bars in a chart."""
MAX_RANKS = 64
"""Largest number of ranks that are drawn one by one."""
_MAX_COLUMNS = 8
"""Largest number of cells in a row."""
_WIDTH, _LABEL_WIDTH, _CELL_HEIGHT = 1080, 200, 66
"""Width of the drawing, width of the stages' labels, and height of a cell, in SVG units."""
_TINTS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#cffafe", "#ffedd5", "#e2e8f0")
COLOURS = len(_TINTS)
"""Number of replicas that have different colours. The colours of further replicas repeat."""
_Place = tuple[int, int]
"""Column and row of a cell."""


def layout_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on the layout of ranks, if the layout is known."""
    layout = summary.layout
    if layout is None:
        return
    text = (
        f"{counted(layout.ranks, 'rank')} = {layout.tensor} tensor x {layout.pipeline} pipeline x "
        f"{layout.data} data; {counted(layout.chunks, 'chunk')} per stage; sequence parallel "
        f"{'on' if layout.sequence else 'off'}; {counted(layout.ranks_per_node, 'rank')} per node. "
    )
    if layout.ranks > MAX_RANKS:
        text += f"Above {MAX_RANKS} ranks, the table shows stages instead of single ranks."
        yield html_page.section("Layout of ranks", _stage_table(layout, summary.ranks), text)
        return
    text += "Cells of one colour together hold one copy of the model. Dark lines are node borders."
    if layout.data > COLOURS:
        text += f" (Colours repeat after {COLOURS} copies.)"
    yield html_page.section("Layout of ranks", rank_map(layout, summary.ranks), text)


def _stage_table(layout: Layout, ranks: Sequence[RankSummary]) -> str:
    grid, per_stage = grid_of(layout), layout.tensor * layout.data
    rows = []
    for stage, members in _by_stage(layout, ranks).items():
        first, last = stage * per_stage, (stage + 1) * per_stage - 1
        peaks = [rank.peak_bytes for rank in members if rank.peak_bytes is not None]
        rows.append(
            [
                f"stage {stage}",
                layer_words(members[0].layers) if members else "",
                f"{first}-{last}",
                f"{grid.node(first)}-{grid.node(last)}",
                format_bytes(max(peaks)) if peaks else "unknown",
            ]
        )
    return html_page.table(["Stage", "Layers", "Ranks", "Nodes", "Largest peak memory"], rows)


def _by_stage(layout: Layout, ranks: Sequence[RankSummary]) -> dict[int, list[RankSummary]]:
    stages: dict[int, list[RankSummary]] = {stage: [] for stage in range(layout.pipeline)}
    for rank in ranks:
        if rank.pipeline in stages:
            stages[rank.pipeline].append(rank)
    return stages


def memory_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on the memory of each rank, if it is known."""
    ranks = summary.ranks
    if not any(rank.memory_bytes or rank.peak_bytes for rank in ranks):
        return
    labels, groups, axis = [str(rank.rank) for rank in ranks], [[rank] for rank in ranks], "rank"
    text = "One bar per rank."
    if len(ranks) > MAX_RANKS and summary.layout is not None:
        stages = _by_stage(summary.layout, ranks)
        labels, groups, axis = [str(stage) for stage in stages], list(stages.values()), "stage"
        text = (
            f"Above {MAX_RANKS} ranks, there is one bar per stage. It shows the maximum over the "
            "ranks of the stage."
        )
    if (interval := -(-len(groups) // _MAX_BARS)) > 1:
        labels, groups = labels[::interval], groups[::interval]
        text += f" Every {interval}th bar is drawn."
    categories = list(dict.fromkeys(name for rank in ranks for name in rank.memory_bytes))
    categories = categories[: len(figures.CATEGORIES) * 2]
    by_category = {
        category: [
            float(max((rank.memory_bytes.get(category, 0) for rank in group), default=0))
            for group in groups
        ]
        for category in categories
    }
    peaks = [
        float(max((rank.peak_bytes or math.nan for rank in group), default=math.nan))
        for group in groups
    ]
    chart = figures.memory_figure(labels, by_category, peaks, axis)
    yield html_page.section("Memory", chart, f"{text} {_compare_memory(ranks)}".strip())


def _compare_memory(ranks: Sequence[RankSummary]) -> str:
    """Return a sentence on whether all categories have the predicted number of bytes."""
    if not all(rank.predicted_bytes for rank in ranks):
        return ""
    for rank in ranks:
        for category, predicted in rank.predicted_bytes.items():
            allocated = rank.memory_bytes.get(category, 0)
            if allocated > predicted or (allocated < predicted and category not in BOUNDED):
                return (
                    f"Rank {rank.rank} holds {format_bytes(allocated)} of {category}; "
                    f"{format_bytes(predicted)} was predicted."
                )
    return (
        "Every category has exactly the predicted number of bytes, except that gathered parameters "
        "and messages are within their predicted upper bounds."
    )


def plan_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section that compares predictions with measurements, if the run made any."""
    if not summary.plan:
        return
    text = (
        "The values are measured on rank 0. Times are taken from the second or the third step, "
        "whichever was shorter. On a CPU, `process` is the memory of the whole process, including "
        "the interpreter and its libraries."
    )
    if all(row.predicted is None for row in summary.plan if row.unit == "seconds"):
        text += (
            " Planned times are unknown: the cluster file has no speeds that were measured on such "
            "a machine (`frontier-llm calibrate`)."
        )
    head = ["", "Planned", "Measured", "Difference"]
    yield html_page.section(
        "Plan and run", html_page.table(head, map(_plan_row, summary.plan)), text
    )


def _plan_row(row: PlanRow) -> list[str]:
    format_value = format_bytes if row.unit == "bytes" else format_seconds
    if row.predicted is None:
        return [row.name, UNKNOWN, format_value(row.measured), ""]
    if row.measured == row.predicted:
        difference = "none"
    else:
        difference = f"{row.measured / row.predicted - 1:+.0%}" if row.predicted else ""
    return [row.name, format_value(row.predicted), format_value(row.measured), difference]


def pipeline_section(summary: RunSummary, timeline: StepTimeline | None) -> Iterator[str]:
    """Yield the section on the pipeline's passes in one step, if they were measured.

    A timeline of another number of stages is ignored: the run has since resumed in another layout.
    """
    if timeline is None or summary.layout is None or timeline.stages != summary.layout.pipeline:
        return
    both = {"planned": timeline.planned, "measured": timeline.measured}
    events = {
        name: [action.event for action in part.actions] for name, part in both.items() if part
    }
    last = max(event.end for part in events.values() for event in part)
    pictures = [
        f"<h3>{name.title()}</h3>{draw(part, f'{name} pipeline', last)}"
        for name, part in events.items()
    ]
    waiting = " and ".join(
        f"{part.waiting_share:.1%} ({name})" for name, part in both.items() if part
    )
    text = (
        f"Each row is a stage, and each box is a pass of step {timeline.step}. Forward passes are "
        "dark blue; backward passes are light blue, or, if they are split, light blue (gradients "
        "of inputs) and green (gradients of weights). Between the boxes a stage waits for other "
        f"stages: {waiting} of the time of all passes, as the mean over the stages."
    )
    if max(event.end for event in events["measured"]) < timeline.measured.seconds:
        text += f" The step is longer: the first {RECORDED_ACTIONS} passes of each stage are drawn."
    yield html_page.section("Pipeline", "".join(pictures), text)


def grid_of(layout: Layout) -> Grid:
    """Return the grid of ranks of a layout."""
    return Grid(layout.tensor, layout.data, layout.pipeline, max(1, layout.ranks_per_node))


def layer_words(layers: Sequence[tuple[int, int]]) -> str:
    """Return the layers of model chunks as text: `0-3, 8-11`.

    A chunk has its first and its last layer, both included. Without layers, its last layer comes
    before its first.
    """
    return ", ".join(
        f"{first}-{last}" if last > first else f"{first}" for first, last in layers if last >= first
    )


def rank_map(layout: Layout, ranks: Sequence[RankSummary]) -> str:
    """Draw up to `MAX_RANKS` ranks as an SVG element.

    All cells of one colour together hold one copy of the model. Thick lines are borders of nodes.
    `ranks` may be incomplete.
    """
    grid, per_stage = grid_of(layout), layout.tensor * layout.data
    known = {rank.rank: layer_words(rank.layers) for rank in ranks}
    hosts = {rank.rank: f" on {rank.host}" for rank in ranks if rank.host}
    columns = _choose_columns(per_stage)
    rows = -(-per_stage // columns)
    width = min(220.0, (_WIDTH - _LABEL_WIDTH - 4) / columns)
    cells, nodes = [], {}
    for rank in range(grid.size):
        at, (stage, in_stage) = grid.coordinates(rank), divmod(rank, per_stage)
        row, column = divmod(in_stage, columns)
        nodes[column, stage * rows + row] = grid.node(rank)
        layers = f", layers {known[rank]}" if rank in known else ""
        cells.append(
            {
                "x": _LABEL_WIDTH + column * width,
                "y": 4 + (stage * rows + row) * _CELL_HEIGHT,
                "width": width,
                "height": _CELL_HEIGHT,
                "tint": _TINTS[at.data % len(_TINTS)],
                "layers": _shortened(f"layers {known.get(rank, '')}", int(width / 6.5)),
                "coordinates": _coordinate_words(layout, at),
                "tooltip": f"rank {rank}{hosts.get(rank, '')}, node {grid.node(rank)}: stage "
                f"{at.pipeline}, replica {at.data}, tensor slice {at.tensor}{layers}",
            }
        )
    head_stage = layout.pipeline - 1 if layout.head_stage is None else layout.head_stage
    stages = [
        {
            "y": 4 + stage * rows * _CELL_HEIGHT,
            "layers": _shortened(f"layers {known.get(stage * per_stage, '')}", 30),
            "ends": " + ".join(["embedding"] * (stage == 0) + ["head"] * (stage == head_stage)),
        }
        for stage in range(layout.pipeline)
    ]
    height = rows * layout.pipeline * _CELL_HEIGHT + 8
    return element("rank_map", _WIDTH, height, stages, cells, "".join(_borders(nodes, width)))


def _coordinate_words(layout: Layout, at: Coordinates) -> str:
    """Name the coordinates on the data and the tensor axis, unless an axis has one rank."""
    data, tensor = [f"data {at.data}"], [f"tensor {at.tensor}"]
    return ", ".join(data * (layout.data > 1) + tensor * (layout.tensor > 1))


def _borders(nodes: Mapping[_Place, int], width: float) -> Iterator[str]:
    """Yield the sides of cells whose neighbour is on another node, as SVG path commands."""
    for (column, row), node in nodes.items():
        left, right = (_LABEL_WIDTH + side * width for side in (column, column + 1))
        top, bottom = (4 + side * _CELL_HEIGHT for side in (row, row + 1))
        for x, neighbour in ((left, column - 1), (right, column + 1)):
            if nodes.get((neighbour, row)) != node:
                yield f"M{x:.1f},{top}V{bottom}"
        for y, neighbour in ((top, row - 1), (bottom, row + 1)):
            if nodes.get((column, neighbour)) != node:
                yield f"M{left:.1f},{y}H{right:.1f}"


def _choose_columns(ranks_per_stage: int) -> int:
    """Choose the number of cells per row so that all rows are equally long, if possible."""
    divisors = [n for n in range(4, _MAX_COLUMNS + 1) if ranks_per_stage % n == 0]
    return max(divisors, default=min(ranks_per_stage, _MAX_COLUMNS))


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"
