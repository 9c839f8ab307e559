"""Count the data ranks of a grid that share a package or a node."""

from frontier_llm.geometry.grid import Grid


def data_ranks_per_node(grid: Grid) -> int | None:
    """Return the number of data ranks with equal tensor and pipeline coordinate on one node.

    The result is None if this number differs between nodes or between coordinates, so that
    "the data ranks of a node" has no meaning.
    """
    return _data_ranks_within(grid, grid.ranks_per_node)


def data_ranks_per_package(grid: Grid) -> int | None:
    """Return the number of data ranks in a package of devices, as `data_ranks_per_node` does.

    If the cluster has no packages, each rank is a package of its own.
    """
    return _data_ranks_within(grid, grid.ranks_per_package)


def level_borders(grid: Grid) -> tuple[int, ...]:
    """Return the numbers of data ranks in a package and in a node, ascending, without useless ones.

    A number is useless if it is 1 or all data ranks, or if packages or nodes differ in it.
    """
    numbers = {data_ranks_per_package(grid), data_ranks_per_node(grid)}
    return tuple(sorted(number for number in numbers if number and 1 < number < grid.data))


def _data_ranks_within(grid: Grid, size: int) -> int | None:
    """Return how many data ranks of a group lie in each run of `size` neighbouring ranks.

    The ranks of a data group are `grid.tensor` apart, and groups of one stage fill a run of
    tensor x data ranks.
    """
    run = grid.tensor * grid.data
    if grid.tensor >= size:
        return 1
    if size % run == 0 or grid.size <= size:
        return grid.data
    return size // grid.tensor if size % grid.tensor == 0 and run % size == 0 else None
