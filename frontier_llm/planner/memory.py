"""Bytes that a rank of each stage needs at its peak, by category.

Model states are exact: geometry/layout.py and geometry/state_memory.py say what sharding/
allocates. Activations are counted tensor by tensor (planner/block.py) at the schedule's depth:
stage i of S holds S - i micro-batches in 1F1B (Narayanan et al., SC'21, section 2.2.1), more when
interleaved. Temporary buffers are bounds; the allocator's slack is a share of what comes and goes.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.layout import predict_bytes
from frontier_llm.geometry.schedule import stage_passes
from frontier_llm.geometry.stages import Piece
from frontier_llm.geometry.state_memory import (
    FP32_BYTES,
    gathered_elements,
    needs_master,
    state_bytes,
)
from frontier_llm.geometry.units import keeps_head
from frontier_llm.geometry.wire import boundary_bytes
from frontier_llm.planner.block import head_product, piece_blocks
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.units import GIB

STATES = ("parameters", "gradients", "master", "moments")
"""Categories that stay from step to step; exact."""
MASTER_AND_MOMENTS_BYTES = 12
"""Of an element in a checkpoint."""


@dataclass(frozen=True)
class StageMemory:
    """What a rank of one stage needs."""

    stage: int
    by_category: dict[str, int]
    """Bytes of the device's memory."""
    host_bytes: int
    """Of main memory, page-locked: what a checkpoint may hold back."""

    @property
    def total(self) -> int:
        """All of the device's."""
        return sum(self.by_category.values())

    @property
    def largest(self) -> str:
        """The category that takes most."""
        return max(self.by_category, key=lambda name: self.by_category[name])


@dataclass(frozen=True)
class Activations:
    """What passes leave behind on a stage: the same whatever the states' factors are."""

    kept: int
    """At the schedule's depth."""
    logits: int
    """And the cross entropy's copies of them."""
    working: int
    """A layer computed again, and the gradients of the largest product."""
    exchange: int
    """Between stages."""


def stage_memory(
    candidate: Candidate, stage: int, activations: Activations | None = None
) -> StageMemory:
    """Predict the peak of a stage's ranks.

    Args:
        candidate: the layout.
        stage: which.
        activations: of the stage, where they are known already.
    """
    config, kind = candidate.config, candidate.model.kind_of(stage)
    passing = activations or stage_activations(candidate, stage, kind)
    by_category = _states(candidate, kind)
    comes_and_goes = {
        "reductions": _reductions(candidate, kind),
        "activations": passing.kept,
        "logits": passing.logits,
        "working": passing.working,
        "exchange": passing.exchange,
    }
    calibration = config.cluster.device.calibration
    slack = calibration.slack_share * (by_category["gathered"] + sum(comes_and_goes.values()))
    by_category |= comes_and_goes
    by_category |= {"reserved": int(calibration.reserved_gib * GIB), "slack": int(slack)}
    return StageMemory(stage, by_category, _host(candidate, kind))


def stages_memory(candidate: Candidate) -> list[StageMemory]:
    """Predict the peak of every stage."""
    return [stage_memory(candidate, stage) for stage in range(candidate.grid.pipeline)]


def fullest(candidate: Candidate) -> StageMemory:
    """Predict the peak of the fullest stage: the first of some kind."""
    return max(
        (stage_memory(candidate, kind.first) for kind in candidate.model.kinds),
        key=lambda memory: memory.total,
    )


def stage_activations(candidate: Candidate, stage: int, kind: StageKind) -> Activations:
    """Count what forward passes leave for backward passes on a stage."""
    config, compute = candidate.config, candidate.compute_bytes
    parallel = config.parallel
    kept = [int(_kept_elements(config, piece) * compute) for piece in kind.pieces]
    depth = 2 * parallel.pipeline  # by then every schedule is in its steady state
    micro_batches = min(candidate.micro_batches, depth)
    head = any(piece.has_head for piece in kind.pieces)
    entries = head_product(config).rows * head_product(config).columns if head else 0
    boundary = boundary_bytes(config, compute) if parallel.pipeline > 1 else 0.0
    return Activations(
        kept=_peak(stage, parallel.pipeline, parallel.chunks, micro_batches, tuple(kept)),
        # as the head makes them, in fp32 as the loss wants them, and their exponentials
        logits=entries * (compute + 8),
        working=int(_working_elements(config, kind) * compute),
        exchange=int(2 * boundary),
    )


def _kept_elements(config: RunConfig, piece: Piece) -> float:
    """Count the elements that one micro-batch leaves on a piece."""
    whole = config.recompute == "full"
    total = 0.0
    for block, count in piece_blocks(config, piece):
        total += count * (block.input_elements if whole else block.kept_elements)
    if piece.has_head:
        total += (
            2.0 * head_product(config).rows * config.model.hidden
        )  # the last norm's input and output
    return total


@lru_cache(maxsize=4096)
def _peak(stage: int, stages: int, chunks: int, micro_batches: int, kept: tuple[int, ...]) -> int:
    """Follow the schedule: a forward pass leaves its piece's bytes, its backward pass frees them.

    Args:
        stage: whose.
        stages: pipeline ranks.
        chunks: pieces a stage.
        micro_batches: of a replica; enough to reach the steady state.
        kept: bytes that a micro-batch leaves, by chunk.
    """
    if chunks == 1:
        return kept[0] * min(stages - stage, micro_batches)
    held = peak = 0
    for forward, chunk in stage_passes(stage, stages, chunks, micro_batches):
        held += kept[chunk] if forward else -kept[chunk]
        peak = max(peak, held)
    return peak


def _working_elements(config: RunConfig, kind: StageKind) -> float:
    blocks = [block for piece in kind.pieces for block, _ in piece_blocks(config, piece)]
    again = max(block.kept_elements for block in blocks) if config.recompute == "full" else 0.0
    widest = max(p.rows * p.columns for block in blocks for p in block.products)
    return again + 2.0 * widest


def _states(candidate: Candidate, kind: StageKind) -> dict[str, int]:
    """Return states and what is gathered of them: what geometry/layout.py predicts, but faster."""
    config, factors, compute = candidate.config, candidate.factors, candidate.compute_bytes
    if candidate.model.formats.encode(compute):
        return predict_bytes(config, kind.first, factors, compute, candidate.grid)
    total = dict.fromkeys(STATES, 0)
    for size, count in kind.units:
        held = state_bytes(factors.padded(size), factors, compute, needs_master(compute))
        for name in STATES:
            total[name] += count * held[name]
    return {**total, "gathered": _gathered(candidate, kind)}


def _gathered(candidate: Candidate, kind: StageKind) -> int:
    """Bound the parameters that are whole at once, as geometry/layout.py does."""
    factors, config = candidate.factors, candidate.config
    if factors.params == 1:
        return 0
    in_flight, keeps = config.sharding.units_in_flight, keeps_head(config.model, kind.pieces)
    units: Counter[int] = Counter()
    for size, count in kind.units:
        units[factors.padded(size)] += count
    return gathered_elements(units, in_flight, keeps) * candidate.compute_bytes


def _reductions(candidate: Candidate, kind: StageKind) -> int:
    """Bound the gradients of a unit as they are made, and the buffers that are being sent."""
    factors, largest = candidate.factors, kind.units[-1][0]
    wire = candidate.model.formats.grads.element_bytes
    made = largest * candidate.compute_bytes
    packs = factors.grads > 1 or (factors.optimizer > 1 and wire < FP32_BYTES)
    if not packs:
        return made
    return made + int(candidate.config.sharding.units_in_flight * largest * wire)


def _host(candidate: Candidate, kind: StageKind) -> int:
    checkpoint = candidate.config.checkpoint
    if checkpoint.mode != "lazy" or candidate.config.cluster.device.kind == "cpu":
        return 0
    own = MASTER_AND_MOMENTS_BYTES * kind.elements // candidate.factors.optimizer
    return own if checkpoint.pool_bytes is None else min(own, checkpoint.pool_bytes)
