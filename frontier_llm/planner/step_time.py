"""Seconds of a step, composed stage by stage.

A stage of forward f and backward b makes M micro-batches; before its first and after its last one
it waits for the others, once each. With C chunks they wait for pieces, 1/C as long (Narayanan et
al., SC'21, section 2.2):

    passes = M max(f + b) + sum over the other stages of (f + b) / C

To f and b belongs what is exposed of the traffic of model states; what comes once a step (sums
over replicas, refresh, norm, update, checkpoint) follows behind the passes.

Traffic beside computation is hidden up to `hidden_share`, but for the share of one unit, which
nothing runs beside.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.geometry.wire import all_reduce_bytes
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, Lines
from frontier_llm.planner.compute import accumulate_seconds, update_seconds
from frontier_llm.planner.layout_time import LayoutTime, Passes, pipeline_seconds
from frontier_llm.planner.stall import checkpoint_stall_seconds
from frontier_llm.planner.state_costs import StateCosts


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go."""

    seconds: float
    """The whole step."""
    parts: dict[str, float]
    """Seconds of the slowest stage, by what it does; they add up to the step."""
    exposed: dict[str, float]
    """Communication that costs time, by link."""
    passes: tuple[tuple[float, float], ...]
    """Forward and backward seconds of one micro-batch, by kind of stage."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the slowest stage waits for others."""
        return self.parts["bubble"] / self.seconds


def step_time(candidate: Candidate, layout: LayoutTime | None = None) -> StepTime:
    """Predict a step.

    Args:
        candidate: the layout.
        layout: what is known of it without its factors.

    Raises:
        ConfigError: the cluster's speed in this precision is not known.
    """
    layout = layout or LayoutTime(candidate)
    stages = [_Stage(candidate, layout, passes) for passes in layout.passes]
    seconds = [stage.seconds for stage in stages]
    pipeline, times = pipeline_seconds(candidate, seconds), candidate.micro_batches
    slowest = max(stages, key=lambda stage: stage.seconds)
    last = max(stages, key=lambda stage: sum(stage.once.values()))
    parts = {name: times * cost for name, cost in slowest.each.items()}
    parts["bubble"] = pipeline - times * slowest.seconds
    parts |= last.once
    step = pipeline + sum(last.once.values())
    parts["checkpoint"] = checkpoint_stall_seconds(candidate, step)
    exposed = [*(Cost(times * cost, link) for cost, link in slowest.each_by_link)]
    return StepTime(
        seconds=step + parts["checkpoint"],
        parts=parts,
        exposed=_by_link([*exposed, *last.once_by_link]),
        passes=tuple((stage.forward, stage.seconds - stage.forward) for stage in stages),
    )


class _Stage:
    """One kind of stage with the traffic of its states.

    Attributes:
        each: seconds of a micro-batch, by part; `each_by_link`: the communication among them.
        once: seconds behind the passes, by part; `once_by_link`: the communication among them.
        forward: seconds of a forward pass with what is exposed.
    """

    def __init__(self, candidate: Candidate, layout: LayoutTime, passes: Passes) -> None:
        self._layout, self._units = layout, sum(count for _, count in passes.kind.units)
        self._costs = StateCosts(candidate, passes.kind, layout.lines, layout.engine)
        n, factors = self._costs.elements, candidate.factors
        compute = candidate.compute_bytes
        summed = accumulate_seconds(n, n // factors.grads, layout.speed, compute)
        forward, backward = passes.compute_forward, passes.compute_backward + summed
        gather = self._exposed(self._costs.gather.seconds, forward)
        self.forward = forward + gather + (passes.tensor.seconds + passes.exchange.seconds) / 2
        again, reduce = self._backward(backward)
        self.each = {
            "compute": forward + backward,
            "tensor": passes.tensor.seconds,
            "exchange": passes.exchange.seconds,
            "gather_params": gather + again,
            "reduce_grads": reduce,
        }
        sums = Cost(self._sums(backward), self._costs.sums.link)
        tied = _tied_cost(candidate, passes.kind, layout.lines)
        self.once = {
            "reduce_states": sums.seconds + tied.seconds,
            "refresh_params": self._refresh(forward),
            "update": update_seconds(n // factors.optimizer, layout.speed, compute),
        }
        costs = self._costs
        self.each_by_link = [
            passes.tensor,
            passes.exchange,
            Cost(self.each["gather_params"], costs.gather.link),
            Cost(self.each["reduce_grads"], costs.scatter.link),
        ]
        self.once_by_link = [
            sums,
            tied,
            Cost(self.once["refresh_params"], costs.refresh.link),
        ]

    @property
    def seconds(self) -> float:
        """Both passes of one micro-batch."""
        return sum(self.each.values())

    def _backward(self, computation: float) -> tuple[float, float]:
        """Return what a backward pass's gathers and scatters cost beside its computation."""
        gather, scatter = self._costs.gather_again.seconds, self._costs.scatter.seconds
        exposed = self._exposed(gather + scatter, computation)
        share = gather / (gather + scatter) if gather + scatter else 0.0
        return exposed * share, exposed * (1 - share)

    def _sums(self, computation: float) -> float:
        """Return what sums over replicas cost beside the last backward pass, which scatters too."""
        traffic = self._costs.gather_again.seconds + self._costs.scatter.seconds
        together = self._exposed(traffic + self._costs.sums.seconds, computation)
        return together - self._exposed(traffic, computation)

    def _refresh(self, computation: float) -> float:
        """Return what the refresh costs beside the next step's first forward pass."""
        traffic = self._costs.gather.seconds
        together = self._exposed(traffic + self._costs.refresh.seconds, computation)
        return together - self._exposed(traffic, computation)

    def _exposed(self, traffic: float, computation: float) -> float:
        return traffic - self._layout.hidden(traffic, computation, self._units)


def _by_link(costs: Iterable[Cost]) -> dict[str, float]:
    """Add seconds up by link; a link that costs nothing is there too."""
    total: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        if cost.link:
            total[cost.link] += cost.seconds
    return dict(total)


def _tied_cost(candidate: Candidate, kind: StageKind, lines: Lines) -> Cost:
    """Return the time to add up the gradients of a tied table over the pipeline's ends."""
    has_table = any(piece.has_embedding or piece.has_head for piece in kind.pieces)
    if not (has_table and candidate.config.model.tied and candidate.grid.pipeline > 1):
        return Cost(0.0, "")
    own = kind.units[-1][0] / candidate.factors.optimizer
    return lines.between_ends(all_reduce_bytes(own * FP32_BYTES, 2))
