"""Predict the part of a step that does not depend on the sharding factors.

It consists of computation, tensor parallel communication and sends between stages. It is a lower
bound on the step with any sharding factors, and a search computes it once for all of them.
"""

from dataclasses import dataclass

from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, GridGroups, Network
from frontier_llm.planner.compute import OURS, Engine, Seconds, Speed, chunk_seconds


@dataclass(frozen=True)
class Passes:
    """Seconds of a micro-batch on one kind of stage, without communication of model states."""

    kind: StageKind
    compute_forward: float
    """Seconds of computation in the forward pass."""
    compute_backward: float
    """Seconds of computation in the backward pass, including recomputation."""
    tensor: Cost
    """Cost of communication between tensor ranks, forward and backward together."""
    exchange: Cost
    """Cost of sends between neighbouring stages, forward and backward together."""

    @property
    def seconds(self) -> float:
        """Seconds of the forward and the backward pass together."""
        compute = self.compute_forward + self.compute_backward
        return compute + self.tensor.seconds + self.exchange.seconds


class LayoutTime:
    """The seconds of a layout that do not depend on its sharding factors."""

    def __init__(self, candidate: Candidate, engine: Engine = OURS) -> None:
        """Predict the passes of every kind of stage.

        Raises:
            ConfigError: the cluster's speed in this precision is not known.
        """
        cluster, layout = candidate.config.cluster, candidate.layout
        self.engine = engine
        self.speed = Speed(cluster.device, layout.precision)
        self.groups = GridGroups(Network(cluster, layout.grid.ranks_per_node), layout.grid)
        self.passes = [self._passes(layout, kind) for kind in candidate.stages.kinds]

    def floor_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound on the seconds of a step with any sharding factors."""
        seconds = [passes.seconds for passes in self.passes]
        return pipeline_seconds(candidate, seconds)

    def hidden(self, traffic: float, computation: float, units: int) -> float:
        """Return the seconds of communication that are hidden behind computation.

        Args:
            traffic: seconds of the communication without overlap.
            computation: seconds of the computation with which it overlaps.
            units: number of messages, one per sharding unit. One message is never hidden, because
                computation waits for the first gather, and the last reduction follows it.
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
            compute_backward=sum(s.input_gradients + s.weight_gradients + s.recomputed for s in compute),
            tensor=self._tensor_cost(layout, kind),
            exchange=self._exchange_cost(layout, compute),
        )

    def _tensor_cost(self, layout: ResolvedLayout, kind: StageKind) -> Cost:
        group = self.groups.tensor
        if layout.grid.tensor == 1:
            return Cost(0.0, group.link)
        sent = sum(map(layout.activation_traffic.tensor_bytes, kind.chunks))
        layers = sum(len(chunk.layers) for chunk in kind.chunks)
        # per layer, two all-reduces in each forward and in each backward pass
        all_reduces = layers * (6 if layout.recompute == "full" else 4)
        if layout.sequence_parallel:  # an all-gather and a reduce-scatter replace each all-reduce
            return group.gather(sent, 2 * all_reduces + layers)
        return group.all_reduce(sent, all_reduces)

    def _exchange_cost(self, layout: ResolvedLayout, compute: list[Seconds]) -> Cost:
        tensor, split = layout.grid.tensor, self.engine.split_exchange
        if layout.grid.pipeline == 1:
            return Cost(0.0, self.groups.to_next_stage(0).link)
        sent = layout.activation_traffic.boundary_bytes()
        send = self.groups.to_next_stage(sent / tensor if split else sent)
        seconds = send.seconds
        if split and tensor > 1:
            seconds += self.groups.tensor.gather(sent * (tensor - 1) / tensor).seconds
        sends = 2 * len(compute)  # an activation and a gradient per model chunk
        total = sends * seconds
        if len(compute) > 1:  # with virtual stages, sends overlap with computation
            computation = sum(s.forward + s.input_gradients + s.weight_gradients + s.recomputed for s in compute)
            total -= self.hidden(total, computation, units=sends)
        return Cost(total, send.link)


def pipeline_seconds(candidate: Candidate, seconds: list[float]) -> float:
    """Return the seconds of all passes of a step, including the pipeline's bubble.

    Args:
        candidate: the layout.
        seconds: for each kind of stage, the seconds of a forward and a backward pass of one
            micro-batch.
    """
    counts = [kind.count for kind in candidate.stages.kinds]
    slowest, layout = max(seconds), candidate.layout
    others = sum(s * count for s, count in zip(seconds, counts, strict=True)) - slowest
    return layout.micro_batches * slowest + others / layout.virtual_stages
