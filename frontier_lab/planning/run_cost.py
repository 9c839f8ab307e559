"""Predict what a run costs: its duration, energy and failures."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from frontier_llm.planner.estimate import Estimate


@dataclass(frozen=True)
class RunCost:
    """Predicted cost of a run. Times without restarts, and without computing lost work again."""

    tokens: float
    steps: int
    days: float
    """Duration, including the time in which training waits for checkpoints."""
    node_hours: float
    megawatt_hours: float | None
    """Energy; None = the cluster file does not give the power of a node."""
    checkpoint_share: float
    """Share of the duration in which training waits for checkpoints."""
    interruptions: float | None
    """Failures of nodes to expect; None = the cluster file does not give their rate."""
    lost_days: float | None
    """Work to compute again after these failures: each loses half the time between two checkpoints
    on average."""

    def to_json(self) -> dict[str, Any]:
        """Return the cost as plain values."""
        return asdict(self)


def run_cost(estimate: Estimate, tokens: float) -> RunCost:
    """Return the cost of training on a number of tokens with an estimated layout."""
    candidate, step_seconds = estimate.candidate, estimate.time.seconds
    config = candidate.config
    steps = math.ceil(tokens / (config.data.global_batch * candidate.layout.lengths.total))
    hours = steps * step_seconds / 3600
    nodes = candidate.grid.nodes
    operation = config.cluster.operation
    watts = operation.node_watts if operation else None
    between_failures = operation.node_hours_per_failure if operation else None
    interruptions = nodes * hours / between_failures if between_failures else None
    lost_days = None
    if interruptions is not None and config.checkpoint.mode != "off":
        lost_days = interruptions * config.checkpoint.every_steps * step_seconds / 2 / 86400
    return RunCost(
        tokens=tokens,
        steps=steps,
        days=hours / 24,
        node_hours=nodes * hours,
        megawatt_hours=nodes * hours * watts / 1e6 if watts else None,
        checkpoint_share=estimate.time.parts["checkpoint"] / step_seconds,
        interruptions=interruptions,
        lost_days=lost_days,
    )
