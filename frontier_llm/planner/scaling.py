"""The best layouts on several numbers of nodes: scaling curves, and the fewest sufficient nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.search import Found, Goal, Progress, search_all


@dataclass(frozen=True)
class Point:
    """The best layouts on one number of nodes."""

    nodes: int
    strong: Estimate | None
    """The best layout for the configured batch; None = no layout fits."""
    weak: Estimate | None
    """The best layout for a batch that grows with the nodes; None = no layout fits."""
    strong_efficiency: float | None
    """Tokens per second and device, relative to the first point."""
    weak_efficiency: float | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "nodes": self.nodes,
            "strong": self.strong.to_json() if self.strong else None,
            "weak": self.weak.to_json() if self.weak else None,
            "strong_efficiency": self.strong_efficiency,
            "weak_efficiency": self.weak_efficiency,
        }


def scaling_curves(configs: Sequence[RunConfig], progress: Progress) -> list[Point]:
    """Search on each number of `planner.nodes`, with a fixed and with a growing batch.

    Args:
        configs: alternatives, among which the best is taken. The growing batch starts from the
            configured one on the first number of nodes.
        progress: called with the progress of the search.

    Raises:
        ConfigError: the cluster's speed in this precision is not known, or a grown batch is not a
            whole number of samples.
    """
    numbers = configs[0].planner.nodes or ()
    points: list[Point] = []
    grown = [[_grown(config, nodes, numbers[0]) for config in configs] for nodes in numbers]
    for done, nodes in enumerate(numbers):
        progress(f"{nodes} nodes", done / len(numbers))
        strong = _best(configs, nodes)
        weak = _best(grown[done], nodes)
        first = points[0] if points else None
        points.append(
            Point(
                nodes,
                strong,
                weak,
                _efficiency(strong, first.strong if first else strong),
                _efficiency(weak, first.weak if first else weak),
            )
        )
    return points


def fewest_nodes(configs: Sequence[RunConfig], progress: Progress) -> Found:
    """Search on `planner.nodes`, the fewest first, until a layout reaches the goal.

    Raises:
        ConfigError: there is no goal, or no number of nodes reaches it.
    """
    config = configs[0]
    goal, numbers = config.planner.goal_tokens_per_second, sorted(config.planner.nodes or ())
    if goal is None or not numbers:
        raise ConfigError(
            "planner.goal_tokens_per_second" if numbers else "planner.nodes",
            "null",
            "a number, and a list of nodes: planner.objective=nodes looks for the fewest nodes "
            "that reach this number",
            "set planner.goal_tokens_per_second=1e6 planner.nodes=[8,16,32,64]",
        )
    best = 0.0
    for done, nodes in enumerate(numbers):
        progress(f"{nodes} nodes", done / len(numbers))
        found = search_all(configs, _goal(config, nodes))
        best = max([best, *(estimated.tokens_per_second for estimated in found.best)])
        if best >= goal:
            return found
    raise ConfigError(
        "planner.goal_tokens_per_second",
        f"{goal:g}",
        f"at most {best:g}, the most that {config.cluster.name} reaches on {numbers} nodes",
        "allow more nodes in planner.nodes, or a larger data.global_batch",
    )


def _best(configs: Sequence[RunConfig], nodes: int) -> Estimate | None:
    found = search_all(configs, _goal(configs[0], nodes))
    return found.best[0] if found.best else None


def _goal(config: RunConfig, nodes: int) -> Goal:
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    return Goal(nodes * per_node, per_node)


def _grown(config: RunConfig, nodes: int, first: int) -> RunConfig:
    batch, rest = divmod(config.data.global_batch * nodes, first)
    if rest:
        raise ConfigError(
            "planner.nodes",
            nodes,
            f"numbers of nodes on which data.global_batch={config.data.global_batch} of {first} "
            "nodes can grow in proportion to a whole number of samples",
            f"choose multiples of {first} nodes, or a data.global_batch that {first} divides",
        )
    data = config.data.model_copy(update={"global_batch": batch})
    return config.model_copy(update={"data": data})


def _efficiency(here: Estimate | None, first: Estimate | None) -> float | None:
    if here is None or first is None:
        return None
    return (here.tokens_per_second / here.candidate.grid.size) / (
        first.tokens_per_second / first.candidate.grid.size
    )
