"""Search layouts on the numbers of nodes of `planner.nodes`, for curves or the fewest nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.search import Found, Goal, Progress, search_all
from frontier_llm.units import counted


@dataclass(frozen=True)
class Point:
    """The best layouts on one number of nodes."""

    nodes: int
    strong: Estimate | None
    """The best layout for the configured batch; None = no layout fits."""
    weak: Estimate | None
    """The best layout for a batch that grows with the nodes; None = no layout fits."""
    strong_efficiency: float | None
    """Tokens per second and device of `strong`, relative to the first point."""
    weak_efficiency: float | None
    """Tokens per second and device of `weak`, relative to the first point."""

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain values, for `frontier-llm plan --json`."""
        return {
            "nodes": self.nodes,
            "strong": self.strong.to_json() if self.strong else None,
            "weak": self.weak.to_json() if self.weak else None,
            "strong_efficiency": self.strong_efficiency,
            "weak_efficiency": self.weak_efficiency,
        }


def scaling_curves(configs: Sequence[RunConfig], progress: Progress) -> list[Point]:
    """Search on each number of `planner.nodes`, with a fixed and with a growing batch.

    The best layout of all configurations is taken. On the first number of nodes, the growing batch
    is the configured batch.
    """
    node_counts = configs[0].planner.nodes or ()
    points: list[Point] = []
    grown_configs = [
        [with_grown_batch(config, nodes, node_counts[0]) for config in configs]
        for nodes in node_counts
    ]
    for index, nodes in enumerate(node_counts):
        progress(counted(nodes, "node"), index / len(node_counts))
        strong = _best(configs, nodes)
        weak = _best(grown_configs[index], nodes)
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
    """Search on ascending numbers of `planner.nodes` until `planner.goal_tokens_per_second` is met.

    Raises:
        ConfigError: the goal or the list of nodes is missing, or the goal is never reached.
    """
    config = configs[0]
    goal, node_counts = config.planner.goal_tokens_per_second, sorted(config.planner.nodes or ())
    if goal is None or not node_counts:
        raise ConfigError(
            "planner.goal_tokens_per_second" if node_counts else "planner.nodes",
            "null",
            "a speed in tokens per second, and a list of nodes: planner.objective=nodes looks for "
            "the fewest nodes that reach this speed",
            "set planner.goal_tokens_per_second=1e6 planner.nodes=[8,16,32,64]",
        )
    best = 0.0
    for index, nodes in enumerate(node_counts):
        progress(counted(nodes, "node"), index / len(node_counts))
        found = search_all(configs, _goal(config, nodes))
        best = max([best, *(estimated.tokens_per_second for estimated in found.best)])
        if best >= goal:
            return found
    raise ConfigError(
        "planner.goal_tokens_per_second",
        f"{goal:g}",
        f"at most {best:g}, the most that {config.cluster.name} reaches on {node_counts} nodes",
        "allow more nodes in planner.nodes, or a larger data.global_batch",
    )


def with_grown_batch(config: RunConfig, nodes: int, first: int) -> RunConfig:
    """Return a configuration whose global batch has grown in proportion from `first` nodes."""
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


def _best(configs: Sequence[RunConfig], nodes: int) -> Estimate | None:
    found = search_all(configs, _goal(configs[0], nodes))
    return found.best[0] if found.best else None


def _goal(config: RunConfig, nodes: int) -> Goal:
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    return Goal(nodes * per_node, per_node)


def _efficiency(here: Estimate | None, first: Estimate | None) -> float | None:
    if here is None or first is None:
        return None
    return (here.tokens_per_second / here.candidate.grid.size) / (
        first.tokens_per_second / first.candidate.grid.size
    )
