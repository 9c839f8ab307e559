"""Which losses leave a copy of every optimizer state, found by looking at every rank."""

from itertools import product

import pytest

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors, survives


def by_looking(grid: Grid, factors: Factors) -> str:
    """Lose every rank, then every node, and look whether the others have all states."""

    def place(rank: int) -> tuple[int, ...]:
        at = grid.coordinates(rank)
        return at.tensor, at.pipeline, *factors.digits(at.data)[:-1]

    places = [place(rank) for rank in range(grid.size)]
    nodes = [{r for r in range(grid.size) if grid.node(r) == n} for n in range(grid.size)]

    def all_left(lost: set[int]) -> bool:
        return set(places) == {places[r] for r in range(grid.size) if r not in lost}

    if all(all_left(node) for node in nodes):
        return "node"
    return "rank" if all(all_left({rank}) for rank in range(grid.size)) else "nothing"


@pytest.mark.parametrize(
    ("tensor", "data", "pipeline", "per_node", "optimizer"),
    [
        case
        for case in product((1, 2, 4), (1, 2, 4, 6), (1, 2, 3), (1, 2, 4, 8), (1, 2, 3, 4, 6))
        if case[1] % case[4] == 0
    ],
)
def test_the_rule_says_what_looking_finds(
    tensor: int, data: int, pipeline: int, per_node: int, optimizer: int
) -> None:
    grid = Grid(tensor, data, pipeline, per_node)
    factors = Factors(1, 1, optimizer, data)
    assert survives(grid, factors) == by_looking(grid, factors)
