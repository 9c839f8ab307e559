"""Which losses leave a copy of every optimizer state in the memory of the other ranks."""

from functools import lru_cache
from typing import Literal

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors

Survives = Literal["nothing", "rank", "node"]
"""The largest part of a job that may be lost at once."""
ORDER: tuple[Survives, ...] = ("nothing", "rank", "node")


@lru_cache
def survives(grid: Grid, factors: Factors) -> Survives:
    """Return what a layout survives without a checkpoint.

    With o optimizer intervals and D replicas, D/o ranks hold the same states. They are o * tensor
    ranks apart. A layout survives a node if not all of them are on the same node.
    """
    copies = factors.data // factors.optimizer
    if copies == 1:
        return "nothing"
    distance = factors.optimizer * grid.tensor
    for stage in range(grid.pipeline):
        for offset in range(distance):
            first = stage * grid.data * grid.tensor + offset
            last = first + (copies - 1) * distance
            if grid.node(first) == grid.node(last):
                return "rank"
    return "node"
