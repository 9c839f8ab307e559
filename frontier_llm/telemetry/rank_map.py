"""A drawing of the layout of ranks: one cell per rank, one block of rows per pipeline stage."""

from collections.abc import Iterator, Sequence
from html import escape

from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.telemetry.summary import Layout, RankSummary

LARGEST = 64
"""Largest number of ranks that are drawn one by one."""
_COLUMNS = 8
_WIDTH, _HEAD, _CELL_HEIGHT = 1080, 200, 66
_TINTS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#cffafe", "#ffedd5", "#e2e8f0")
COLOURS = len(_TINTS)
"""Replicas with different colours; the colours of further replicas repeat."""


def grid_of(layout: Layout) -> Grid:
    """Return the grid of ranks of a layout."""
    return Grid(layout.tensor, layout.data, layout.pipeline, max(1, layout.ranks_per_node))


def layer_words(layers: Sequence[tuple[int, int]]) -> str:
    """Return the layers of each chunk as text: `0-3, 8-11`."""
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in layers if b >= a)


def rank_map(layout: Layout, ranks: Sequence[RankSummary]) -> str:
    """Draw up to `LARGEST` ranks as SVG.

    Cells of one colour together hold one copy of the model; a thick line is the border of a node.
    """
    return _RankMap(layout, ranks).svg()


class _RankMap:
    def __init__(self, layout: Layout, ranks: Sequence[RankSummary]) -> None:
        self._layout, self._grid = layout, grid_of(layout)
        self._known = {rank.rank: rank for rank in ranks}
        stage_ranks = layout.tensor * layout.data
        self._columns = _columns(stage_ranks)
        self._lines = -(-stage_ranks // self._columns)
        self._stage_ranks = stage_ranks
        self._cell_width = min(220.0, (_WIDTH - _HEAD - 4) / self._columns)

    def svg(self) -> str:
        height = self._lines * self._layout.pipeline * _CELL_HEIGHT + 8
        parts = [
            *(self._head(stage) for stage in range(self._layout.pipeline)),
            *(self._cell(rank) for rank in range(self._grid.size)),
            self._node_borders(),
        ]
        return (
            f'<svg class="ranks" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-label="grid of ranks">{"".join(parts)}</svg>'
        )

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the column and row of a rank's cell."""
        stage, within = divmod(rank, self._stage_ranks)
        line, column = divmod(within, self._columns)
        return column, stage * self._lines + line

    def _corner(self, column: int, row: int) -> tuple[float, float]:
        return _HEAD + column * self._cell_width, 4 + row * _CELL_HEIGHT

    def _head(self, stage: int) -> str:
        """Return the label of a stage, which is left of its cells."""
        y = 4 + stage * self._lines * _CELL_HEIGHT + 28
        first = self._known.get(self._grid.rank(Coordinates(0, 0, stage)))
        layers = layer_words(first.layers) if first else ""
        ends = ["embedding"] * (stage == 0) + ["head"] * (stage == self._layout.pipeline - 1)
        return (
            f'<text x="0" y="{y}" class="stage">stage {stage}</text>'
            f'<text x="0" y="{y + 17}" class="small">{_shortened(f"layers {layers}", 30)}</text>'
            f'<text x="0" y="{y + 32}" class="small faint">{" + ".join(ends)}</text>'
        )

    def _cell(self, rank: int) -> str:
        x, y = self._corner(*self._place(rank))
        at = self._grid.coordinates(rank)
        width, middle = self._cell_width, x + self._cell_width / 2
        known = self._known.get(rank)
        layers = layer_words(known.layers) if known else ""
        return (
            f"<g><title>{escape(self._tooltip(rank, known))}</title>"
            f'<rect x="{x + 4:.1f}" y="{y + 4:.1f}" width="{width - 8:.1f}" '
            f'height="{_CELL_HEIGHT - 8}" rx="6" fill="{_TINTS[at.data % len(_TINTS)]}"/>'
            f'<text x="{middle:.1f}" y="{y + 24:.1f}" class="rank">rank {rank}</text>'
            f'<text x="{middle:.1f}" y="{y + 39:.1f}" class="small">'
            f"{_shortened(f'layers {layers}', int(width / 6.5))}</text>"
            f'<text x="{middle:.1f}" y="{y + 53:.1f}" class="small faint">'
            f"{self._part_words(at)}</text></g>"
        )

    def _part_words(self, at: Coordinates) -> str:
        """Name the replica and the tensor slice, unless the axis has only one rank."""
        tensor, data = self._layout.tensor > 1, self._layout.data > 1
        words = data * [f"data {at.data}"] + tensor * [f"tensor {at.tensor}"]
        return ", ".join(words)

    def _tooltip(self, rank: int, known: RankSummary | None) -> str:
        at = self._grid.coordinates(rank)
        host = f" on {known.host}" if known and known.host else ""
        layers = f", layers {layer_words(known.layers)}" if known else ""
        return (
            f"rank {rank}{host}, node {self._grid.node(rank)}: stage {at.pipeline}, "
            f"replica {at.data}, tensor slice {at.tensor}{layers}"
        )

    def _node_borders(self) -> str:
        nodes = {self._place(rank): self._grid.node(rank) for rank in range(self._grid.size)}
        segments = "".join(self._borders(nodes))
        return f'<path class="node" d="{segments}"/>'

    def _borders(self, nodes: dict[tuple[int, int], int]) -> Iterator[str]:
        """Yield the sides of cells whose neighbour is on another node."""
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


def _columns(stage_ranks: int) -> int:
    """Choose the number of cells per line; lines of a stage are equally long if possible."""
    fitting = [n for n in range(4, _COLUMNS + 1) if stage_ranks % n == 0]
    return max(fitting, default=min(stage_ranks, _COLUMNS))


def _shortened(text: str, length: int) -> str:
    return escape(text if len(text) <= length else text[: max(1, length - 1)] + "…")
