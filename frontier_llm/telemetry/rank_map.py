"""Draw the layout of ranks for the report: one cell per rank, one block of rows per pipeline stage.

report_sections.py calls this module.
"""

from collections.abc import Iterator, Sequence
from html import escape

from frontier_llm.geometry.grid import Coordinates, Grid
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


def grid_of(layout: Layout) -> Grid:
    """Return the grid of ranks of a layout."""
    return Grid(layout.tensor, layout.data, layout.pipeline, max(1, layout.ranks_per_node))


def layer_words(layers: Sequence[tuple[int, int]]) -> str:
    """Return the layers of model chunks as text: `0-3, 8-11`.

    Args:
        layers: first and last layer of each chunk, both included. A chunk without layers has a last
            layer before the first.
    """
    return ", ".join(
        f"{first}-{last}" if last > first else f"{first}" for first, last in layers if last >= first
    )


def rank_map(layout: Layout, ranks: Sequence[RankSummary]) -> str:
    """Draw up to `MAX_RANKS` ranks as an SVG element.

    All cells of one colour together hold one copy of the model. Thick lines are borders of nodes.

    Args:
        layout: how the model is divided over ranks.
        ranks: what is known of the ranks; may be incomplete.
    """
    return _RankMap(layout, ranks).svg()


class _RankMap:
    """Draws the ranks of one layout."""

    def __init__(self, layout: Layout, ranks: Sequence[RankSummary]) -> None:
        self._layout, self._grid = layout, grid_of(layout)
        self._summaries = {rank.rank: rank for rank in ranks}
        self._ranks_per_stage = layout.tensor * layout.data
        self._columns = _choose_columns(self._ranks_per_stage)
        self._rows_per_stage = -(-self._ranks_per_stage // self._columns)
        self._cell_width = min(220.0, (_WIDTH - _LABEL_WIDTH - 4) / self._columns)

    def svg(self) -> str:
        """Return the drawing."""
        height = self._rows_per_stage * self._layout.pipeline * _CELL_HEIGHT + 8
        parts = [
            *(self._stage_label(stage) for stage in range(self._layout.pipeline)),
            *(self._cell(rank) for rank in range(self._grid.size)),
            self._node_borders(),
        ]
        return (
            f'<svg class="ranks" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-label="grid of ranks">{"".join(parts)}</svg>'
        )

    def _cell_position(self, rank: int) -> tuple[int, int]:
        """Return the column and row of a rank's cell."""
        stage, rank_in_stage = divmod(rank, self._ranks_per_stage)
        row_in_stage, column = divmod(rank_in_stage, self._columns)
        return column, stage * self._rows_per_stage + row_in_stage

    def _corner(self, column: int, row: int) -> tuple[float, float]:
        """Return x and y of the upper left corner of a cell."""
        return _LABEL_WIDTH + column * self._cell_width, 4 + row * _CELL_HEIGHT

    def _stage_label(self, stage: int) -> str:
        """Draw the label of a stage, which is left of its cells."""
        y = 4 + stage * self._rows_per_stage * _CELL_HEIGHT + 28
        first_rank = self._summaries.get(self._grid.rank(Coordinates(0, 0, stage)))
        layers = layer_words(first_rank.layers) if first_rank else ""
        head_stage = self._layout.head_stage
        if head_stage is None:
            head_stage = self._layout.pipeline - 1
        ends = ["embedding"] * (stage == 0) + ["head"] * (stage == head_stage)
        return (
            f'<text x="0" y="{y}" class="stage">stage {stage}</text>'
            f'<text x="0" y="{y + 17}" class="small">{_shortened(f"layers {layers}", 30)}</text>'
            f'<text x="0" y="{y + 32}" class="small faint">{" + ".join(ends)}</text>'
        )

    def _cell(self, rank: int) -> str:
        """Draw the cell of a rank."""
        x, y = self._corner(*self._cell_position(rank))
        coordinates = self._grid.coordinates(rank)
        width, middle = self._cell_width, x + self._cell_width / 2
        summary = self._summaries.get(rank)
        layers = layer_words(summary.layers) if summary else ""
        return (
            f"<g><title>{escape(self._tooltip(rank, summary))}</title>"
            f'<rect x="{x + 4:.1f}" y="{y + 4:.1f}" width="{width - 8:.1f}" '
            f'height="{_CELL_HEIGHT - 8}" rx="6" fill="{_TINTS[coordinates.data % len(_TINTS)]}"/>'
            f'<text x="{middle:.1f}" y="{y + 24:.1f}" class="rank">rank {rank}</text>'
            f'<text x="{middle:.1f}" y="{y + 39:.1f}" class="small">'
            f"{_shortened(f'layers {layers}', int(width / 6.5))}</text>"
            f'<text x="{middle:.1f}" y="{y + 53:.1f}" class="small faint">'
            f"{self._coordinate_words(coordinates)}</text></g>"
        )

    def _coordinate_words(self, coordinates: Coordinates) -> str:
        """Name the coordinates on the data and the tensor axis, unless an axis has one rank."""
        words = []
        if self._layout.data > 1:
            words.append(f"data {coordinates.data}")
        if self._layout.tensor > 1:
            words.append(f"tensor {coordinates.tensor}")
        return ", ".join(words)

    def _tooltip(self, rank: int, summary: RankSummary | None) -> str:
        coordinates = self._grid.coordinates(rank)
        host = f" on {summary.host}" if summary and summary.host else ""
        layers = f", layers {layer_words(summary.layers)}" if summary else ""
        return (
            f"rank {rank}{host}, node {self._grid.node(rank)}: stage {coordinates.pipeline}, "
            f"replica {coordinates.data}, tensor slice {coordinates.tensor}{layers}"
        )

    def _node_borders(self) -> str:
        """Draw the borders of all nodes."""
        nodes = {
            self._cell_position(rank): self._grid.node(rank) for rank in range(self._grid.size)
        }
        segments = "".join(self._border_segments(nodes))
        return f'<path class="node" d="{segments}"/>'

    def _border_segments(self, nodes: dict[tuple[int, int], int]) -> Iterator[str]:
        """Yield the sides of cells whose neighbour is on another node, as SVG path commands.

        Args:
            nodes: node of each cell, by column and row.
        """
        for (column, row), node in nodes.items():
            left, top = self._corner(column, row)
            right, bottom = self._corner(column + 1, row + 1)
            if nodes.get((column - 1, row)) != node:
                yield f"M{left:.1f},{top}V{bottom}"
            if nodes.get((column + 1, row)) != node:
                yield f"M{right:.1f},{top}V{bottom}"
            if nodes.get((column, row - 1)) != node:
                yield f"M{left:.1f},{top}H{right:.1f}"
            if nodes.get((column, row + 1)) != node:
                yield f"M{left:.1f},{bottom}H{right:.1f}"


def _choose_columns(ranks_per_stage: int) -> int:
    """Choose the number of cells per row so that all rows are equally long, if possible."""
    divisors = [n for n in range(4, _MAX_COLUMNS + 1) if ranks_per_stage % n == 0]
    return max(divisors, default=min(ranks_per_stage, _MAX_COLUMNS))


def _shortened(text: str, length: int) -> str:
    """Return at most `length` characters of a text, escaped for HTML."""
    return escape(text if len(text) <= length else text[: max(1, length - 1)] + "…")
