"""The seconds of a layout that do not depend on how its model states are cut.

They are a lower bound for every choice of factors. In a search they are computed once for all of
them.
"""

from dataclasses import dataclass

from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, GridGroups, Network
from frontier_llm.planner.compute import OURS, Engine, Seconds, Speed, chunk_seconds


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch on a kind of stage, without communication of model states."""

    kind: StageKind
    compute_forward: float
    compute_backward: float
    """Including recomputation."""
    tensor: Cost
    """Communication between tensor ranks, forward and backward."""
    exchange: Cost
    """Communication with the neighbouring stages, forward and backward."""

    @property
    def seconds(self) -> float:
        """Seconds of the forward and the backward pass."""
        compute = self.compute_forward + self.compute_backward
        return compute + self.tensor.seconds + self.exchange.seconds


class LayoutTime:
    """The seconds of a layout that do not depend on how its model states are cut."""

    def __init__(self, candidate: Candidate, engine: Engine = OURS) -> None:
        """Evaluate every kind of stage.

        Raises:
            ConfigError: the cluster's speed in this precision is not known.
        """
        cluster, layout = candidate.config.cluster, candidate.layout
        self.engine = engine
        self.speed = Speed(cluster.device, layout.precision)
        self.groups = GridGroups(Network(cluster, layout.grid.ranks_per_node), layout.grid)
        self.passes = [self._passes(layout, kind) for kind in candidate.stages.kinds]

    def floor_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound on the seconds of a step with any factors."""
        seconds = [passes.seconds for passes in self.passes]
        return pipeline_seconds(candidate, seconds)

    def hidden(self, traffic: float, computation: float, units: int) -> float:
        """Return the seconds of communication that overlap with computation.

        Args:
            traffic: seconds of the communication alone.
            computation: seconds of the computation.
            units: number of units that are communicated; one of them overlaps with nothing.
        """
        if not self.engine.overlaps:
            return 0.0
        share = self.speed.hidden_share
        return share * min(traffic * (1 - 1 / max(units, 1)), computation)

    def _passes(self, layout: ResolvedLayout, kind: StageKind) -> Passes:
        compute = [chunk_seconds(layout, chunk, self.speed, self.engine) for chunk in kind.chunks]
        return Passes(
            kind,
            compute_forward=sum(seconds.forward for seconds in compute),
            compute_backward=sum(seconds.backward + seconds.recomputed for seconds in compute),
            tensor=self._tensor(layout, kind),
            exchange=self._exchange(layout, compute),
        )

    def _tensor(self, layout: ResolvedLayout, kind: StageKind) -> Cost:
        group = self.groups.tensor
        if layout.grid.tensor == 1:
            return Cost(0.0, group.link)
        sent = sum(map(layout.activation_traffic.tensor_bytes, kind.chunks))
        layers = sum(len(chunk.layers) for chunk in kind.chunks)
        sums = layers * (6 if layout.recompute == "full" else 4)
        if layout.sequence_parallel:  # each sum is a gather and a scatter
            return group.gather(sent, 2 * sums + layers)
        return group.all_reduce(sent, sums)

    def _exchange(self, layout: ResolvedLayout, compute: list[Seconds]) -> Cost:
        tensor, split = layout.grid.tensor, self.engine.split_exchange
        if layout.grid.pipeline == 1:
            return Cost(0.0, self.groups.to_next_stage(0).link)
        sent = layout.activation_traffic.boundary_bytes()
        one = self.groups.to_next_stage(sent / tensor if split else sent)
        seconds = one.seconds
        if split and tensor > 1:
            seconds += self.groups.tensor.gather(sent * (tensor - 1) / tensor).seconds
        both = 2 * len(compute) * seconds
        if len(compute) > 1:  # with virtual stages it overlaps with computation
            computation = sum(s.forward + s.backward + s.recomputed for s in compute)
            both -= self.hidden(both, computation, units=2 * len(compute))
        return Cost(both, one.link)


def pipeline_seconds(candidate: Candidate, seconds: list[float]) -> float:
    """Return the seconds of all passes of a step, including the pipeline's bubble.

    Args:
        candidate: the layout.
        seconds: of a forward and a backward pass of one micro-batch, by kind of stage.
    """
    counts = [kind.count for kind in candidate.stages.kinds]
    slowest, layout = max(seconds), candidate.layout
    others = sum(s * n for s, n in zip(seconds, counts, strict=True)) - slowest
    return layout.micro_batches * slowest + others / layout.virtual_stages
