"""Predict seconds of matrix products on a device that computes them tile by tile.

A GPU divides the result of a product into tiles and computes as many at a time as it has
multiprocessors (NVIDIA) or compute units (AMD). The number of rounds, called waves, is
whole, so a product whose last wave is partly empty is slower (NVIDIA, "Matrix multiplication
background", section on tile and wave quantisation). A library may also divide the inner dimension
of a product with few tiles (split-K). It chooses the fastest of its kernels; so does this module.
"""

import math
from functools import lru_cache
from typing import NamedTuple


class Tile(NamedTuple):
    """A tile of the result that one multiprocessor computes at a time."""

    rows: int
    columns: int
    speed: float
    """Speed relative to the largest tile, which reuses its operands most."""


TILES = (
    Tile(256, 128, 1.0),
    Tile(128, 256, 1.0),
    Tile(128, 128, 0.92),
    Tile(64, 64, 0.6),
)
"""Tiles of cuBLAS's kernels for tensor cores."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which the inner dimension may be divided."""
PROLOGUE = 64
"""Steps along the inner dimension that a tile takes to load its first operands and to store its
result, while the matrix units wait."""
WHOLE_WAVES = 0.6
"""Weight of whole waves against fractions of waves. The tiles of one wave do not all end at the
same time, so the next wave starts before the last tile of a wave ends."""


@lru_cache(maxsize=65536)
def tile_flops(rows: int, inner: int, columns: int, count: int, processors: int) -> float:
    """Return the operations that each processor has time for during `count` equal products.

    Args:
        rows: rows of the result.
        inner: inner dimension.
        columns: columns of the result.
        count: number of independent products of one kernel.
        processors: multiprocessors or compute units of the device.

    Returns:
        Operations of one processor at full speed, waiting included.
    """
    least = math.inf
    for tile in TILES:
        tiles = count * -(-rows // tile.rows) * -(-columns // tile.columns)
        tile_cost = 2 * tile.rows * tile.columns / tile.speed
        for split in SPLITS:
            filled = tiles * split / processors
            waves = WHOLE_WAVES * math.ceil(filled) + (1 - WHOLE_WAVES) * max(filled, 1.0)
            least = min(least, waves * tile_cost * (inner / split + PROLOGUE))
    return least
