"""The seconds of a layout that do not depend on how its model states are cut.

They bound every choice of factors from below, and are shared by all of them in a search.
"""

from dataclasses import dataclass

from frontier_llm.geometry.wire import boundary_bytes, tensor_bytes
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.communication import Cost, Lines, Network
from frontier_llm.planner.compute import Seconds, Speed, piece_seconds
from frontier_llm.planner.engine import OURS, Engine


@dataclass(frozen=True)
class Passes:
    """One micro-batch on the stages of a kind, without the traffic of model states."""

    kind: StageKind
    compute_forward: float
    compute_backward: float
    """What is recomputed included."""
    tensor: Cost
    """Between tensor ranks, both passes."""
    exchange: Cost
    """With the neighbouring stages, both passes."""

    @property
    def seconds(self) -> float:
        """Both passes."""
        compute = self.compute_forward + self.compute_backward
        return compute + self.tensor.seconds + self.exchange.seconds


class LayoutTime:
    """The times of a layout that do not depend on how its states are cut."""

    def __init__(self, candidate: Candidate, engine: Engine = OURS) -> None:
        """Evaluate every kind of stage.

        Raises:
            ConfigError: the cluster's speed in this precision is not known.
        """
        config = candidate.config
        self.engine = engine
        self.speed = Speed(config.cluster.device, candidate.precision)
        network = Network(config.cluster, candidate.grid.ranks_per_node)
        self.lines = Lines(network, candidate.grid)
        self.passes = [self._passes(candidate, kind) for kind in candidate.model.kinds]

    def floor_seconds(self, candidate: Candidate) -> float:
        """Return what no choice of factors can undercut."""
        seconds = [passes.seconds for passes in self.passes]
        return pipeline_seconds(candidate, seconds)

    def hidden(self, traffic: float, computation: float, units: int) -> float:
        """Return the seconds of traffic that cost nothing beside computation.

        Args:
            traffic: seconds, if it were alone.
            computation: seconds beside which it runs.
            units: that it is for; that of one runs beside nothing.
        """
        if not self.engine.hides:
            return 0.0
        share = self.speed.hidden_share
        return share * min(traffic * (1 - 1 / max(units, 1)), computation)

    def _passes(self, candidate: Candidate, kind: StageKind) -> Passes:
        compute = [
            piece_seconds(candidate.config, piece, self.speed, self.engine, candidate.compute_bytes)
            for piece in kind.pieces
        ]
        forward = sum(seconds.forward for seconds in compute)
        backward = sum(seconds.backward + seconds.again for seconds in compute)
        return Passes(
            kind,
            forward,
            backward,
            self._tensor(candidate, kind),
            self._exchange(candidate, compute),
        )

    def _tensor(self, candidate: Candidate, kind: StageKind) -> Cost:
        config, width = candidate.config, candidate.grid.tensor
        if width == 1:
            return Cost(0.0, self.lines.tensor.link)
        sent = sum(tensor_bytes(config, p, candidate.compute_bytes) for p in kind.pieces)
        layers = sum(len(piece.layers) for piece in kind.pieces)
        sums = layers * (6 if config.recompute == "full" else 4)
        if config.parallel.sequence:  # each sum is a gather and a scatter
            return self.lines.tensor.gather(sent, 2 * sums + layers)
        return self.lines.tensor.all_reduce(sent, sums)

    def _exchange(self, candidate: Candidate, compute: list[Seconds]) -> Cost:
        config, tensor = candidate.config, candidate.grid.tensor
        if config.parallel.pipeline == 1:
            return Cost(0.0, self.lines.to_next_stage(0).link)
        sent = boundary_bytes(config, candidate.compute_bytes)
        one = self.lines.to_next_stage(sent / tensor if self.engine.split_exchange else sent)
        seconds = one.seconds
        if self.engine.split_exchange and tensor > 1:
            seconds += self.lines.tensor.gather(sent * (tensor - 1) / tensor).seconds
        both = 2 * len(compute) * seconds
        if len(compute) > 1:  # chunks overlap it
            beside = sum(s.forward + s.backward + s.again for s in compute)
            both -= self.hidden(both, beside, units=2 * len(compute))
        return Cost(both, one.link)


def pipeline_seconds(candidate: Candidate, seconds: list[float]) -> float:
    """Compose the passes of all stages from those of each kind.

    Args:
        candidate: the layout.
        seconds: forward and backward of one micro-batch, by kind of stage.
    """
    counts = [kind.count for kind in candidate.model.kinds]
    slowest = max(seconds)
    others = sum(s * n for s, n in zip(seconds, counts, strict=True)) - slowest
    return candidate.micro_batches * slowest + others / candidate.config.parallel.chunks
