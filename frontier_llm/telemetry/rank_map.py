"""Draw the layout of ranks for the report: one cell per rank, one block of rows per stage."""

from collections.abc import Iterator, Mapping, Sequence

from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.telemetry.html_page import element
from frontier_llm.telemetry.summary import Layout, RankSummary

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
