"""Seconds of a step, composed of the seconds of its stages.

A stage takes f seconds for a forward pass and b for a backward pass of one micro-batch, and
computes M micro-batches. Before its first and after its last one it waits for the other stages.
With C virtual stages per stage it waits for passes of single model chunks, 1/C as long (Narayanan
et al., SC'21, section 2.2):

    passes = M max(f + b) + sum over the other stages of (f + b) / C

f and b include the communication of model states that does not overlap. Work that is done once per
step (sums over replicas, refresh, norm, update, checkpoint) follows the passes.

A share of at most `hidden_share` of communication overlaps with computation. The communication of
one unit overlaps with nothing.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.geometry.wire import all_reduce_bytes
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, GridGroups
from frontier_llm.planner.compute import accumulate_seconds, update_seconds
from frontier_llm.planner.layout_time import LayoutTime, Passes, pipeline_seconds
from frontier_llm.planner.memory import MASTER_AND_MOMENTS_BYTES
from frontier_llm.planner.state_costs import StateCosts


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step and of its parts."""

    seconds: float
    """Seconds of the step."""
    parts: dict[str, float]
    """Seconds of each part of the slowest stage's work; they add up to the step."""
    exposed: dict[str, float]
    """Seconds of communication that does not overlap, by link."""
    passes: tuple[tuple[float, float], ...]
    """Forward and backward seconds of one micro-batch, by kind of stage."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the slowest stage waits for other stages."""
        return self.parts["bubble"] / self.seconds


def step_time(candidate: Candidate, layout: LayoutTime | None = None) -> StepTime:
    """Predict the seconds of a step.

    Args:
        candidate: the layout.
        layout: times that candidates with other sharding factors share, if already computed.

    Raises:
        ConfigError: the cluster's speed in this precision is not known.
    """
    layout = layout or LayoutTime(candidate)
    stages = [_Stage(candidate, layout, passes) for passes in layout.passes]
    seconds = [stage.seconds for stage in stages]
    pipeline, times = pipeline_seconds(candidate, seconds), candidate.layout.micro_batches
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


def checkpoint_stall_seconds(candidate: Candidate, step_seconds: float) -> float:
    """Return the average seconds per step of waiting for checkpoints.

    Each node writes the states of its ranks to the last of the cluster's storages. In mode
    `blocking` the run waits for the whole write; in mode `lazy` for the part that is not finished
    when the next checkpoint is due. Zero if the cluster describes no storage.

    Args:
        candidate: the layout.
        step_seconds: seconds of a step without checkpoints.
    """
    config = candidate.config
    checkpoint, storage = config.checkpoint, config.cluster.storage
    if checkpoint.mode == "off" or not storage:
        return 0.0
    fullest = max(kind.elements for kind in candidate.stages.kinds)
    writers = min(candidate.grid.ranks_per_node, candidate.grid.size)
    of_rank = MASTER_AND_MOMENTS_BYTES * fullest / candidate.factors.optimizer
    writing = writers * of_rank / (storage[-1].write_gb_per_second * 1e9)
    steps = checkpoint.every_steps
    hidden = steps * step_seconds if checkpoint.mode == "lazy" else 0.0
    return max(0.0, writing - hidden) / steps


class _Stage:
    """The seconds of one kind of stage, including the communication of its states.

    Attributes:
        each: seconds per micro-batch, by part; `each_by_link`: those of communication.
        once: seconds per step after the passes, by part; `once_by_link`: those of communication.
        forward: seconds of a forward pass, including communication that does not overlap.
    """

    def __init__(self, candidate: Candidate, layout: LayoutTime, passes: Passes) -> None:
        self._layout, self._units = layout, sum(count for _, count in passes.kind.units)
        self._costs = StateCosts(candidate, passes.kind, layout.groups, layout.engine)
        n, factors = self._costs.elements, candidate.factors
        compute = candidate.layout.compute_bytes
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
        tied = _tied_cost(candidate, passes.kind, layout.groups)
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
        """Seconds of the forward and the backward pass of one micro-batch."""
        return sum(self.each.values())

    def _backward(self, computation: float) -> tuple[float, float]:
        """Return the seconds of a backward pass's gathers and scatters that do not overlap."""
        gather, scatter = self._costs.gather_again.seconds, self._costs.scatter.seconds
        exposed = self._exposed(gather + scatter, computation)
        share = gather / (gather + scatter) if gather + scatter else 0.0
        return exposed * share, exposed * (1 - share)

    def _sums(self, computation: float) -> float:
        """Return the seconds of sums over replicas that do not overlap with backward passes."""
        traffic = self._costs.gather_again.seconds + self._costs.scatter.seconds
        together = self._exposed(traffic + self._costs.sums.seconds, computation)
        return together - self._exposed(traffic, computation)

    def _refresh(self, computation: float) -> float:
        """Return the seconds of the refresh that do not overlap with the next forward pass."""
        traffic = self._costs.gather.seconds
        together = self._exposed(traffic + self._costs.refresh.seconds, computation)
        return together - self._exposed(traffic, computation)

    def _exposed(self, traffic: float, computation: float) -> float:
        return traffic - self._layout.hidden(traffic, computation, self._units)


def _by_link(costs: Iterable[Cost]) -> dict[str, float]:
    """Return the sums of seconds by link, including links with zero seconds."""
    total: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        if cost.link:
            total[cost.link] += cost.seconds
    return dict(total)


def _tied_cost(candidate: Candidate, kind: StageKind, groups: GridGroups) -> Cost:
    """Return the cost of adding up a tied table's gradients of the first and the last stage."""
    has_table = any(chunk.has_embedding or chunk.has_head for chunk in kind.chunks)
    if not (has_table and candidate.layout.model.tied and candidate.grid.pipeline > 1):
        return Cost(0.0, "")
    own = kind.units[-1][0] / candidate.factors.optimizer
    return groups.between_ends(all_reduce_bytes(own * FP32_BYTES, 2))
