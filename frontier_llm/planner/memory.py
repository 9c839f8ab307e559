"""Peak memory of a rank of each stage in bytes, by category.

Model states are exact: geometry/ counts what sharding/ allocates. Activations are counted tensor by
tensor (planner/block.py) for all micro-batches in flight: stage i of S holds S - i micro-batches in
1F1B (Narayanan et al., SC'21, section 2.2.1), more in the interleaved schedule. Temporary buffers
are upper bounds; the allocator's slack is a share of all memory that is not allocated permanently.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from frontier_llm.geometry.model_chunks import ModelChunk, has_shared_table
from frontier_llm.geometry.pipeline_schedule import stage_passes
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import (
    FP32_BYTES,
    gathered_elements,
    needs_master,
    state_bytes,
)
from frontier_llm.planner.block import chunk_blocks, head_product
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.units import GIB

STATES = ("parameters", "gradients", "master", "moments")
"""Categories that are allocated permanently; their predictions are exact."""
MASTER_AND_MOMENTS_BYTES = 12
"""Bytes per element in a checkpoint."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted peak memory of a rank of one stage."""

    stage: int
    by_category: dict[str, int]
    """Bytes of device memory."""
    host_bytes: int
    """Bytes of page-locked main memory, which holds checkpoints until they are written."""

    @property
    def total(self) -> int:
        """Bytes of device memory in all categories."""
        return sum(self.by_category.values())

    @property
    def largest(self) -> str:
        """Name of the largest category."""
        return max(self.by_category, key=lambda name: self.by_category[name])


@dataclass(frozen=True)
class Activations:
    """Bytes of a stage's activations, which do not depend on the factors."""

    kept: int
    """Kept for the backward passes of all micro-batches in flight."""
    logits: int
    """Logits, and the cross entropy's copies of them."""
    working: int
    """Activations of a recomputed layer, and gradients of the largest product."""
    exchange: int
    """Buffers for sending between stages."""


def stage_memory(
    candidate: Candidate, stage: int, activations: Activations | None = None
) -> StageMemory:
    """Predict the peak memory of a stage's ranks.

    Args:
        candidate: the layout.
        stage: position on the pipeline axis.
        activations: of the stage, if they are known already.
    """
    layout, kind = candidate.layout, candidate.stages.kind_of(stage)
    activations = activations or stage_activations(layout, stage, kind)
    by_category = _states(layout, kind)
    temporary = {
        "reductions": _reductions(layout, kind),
        "activations": activations.kept,
        "logits": activations.logits,
        "working": activations.working,
        "exchange": activations.exchange,
    }
    calibration = candidate.config.cluster.device.calibration
    slack = calibration.slack_share * (by_category["gathered"] + sum(temporary.values()))
    by_category |= temporary
    by_category |= {"reserved": int(calibration.reserved_gib * GIB), "slack": int(slack)}
    return StageMemory(stage, by_category, _host(candidate, kind))


def stages_memory(candidate: Candidate) -> list[StageMemory]:
    """Predict the peak memory of every stage."""
    return [stage_memory(candidate, stage) for stage in range(candidate.grid.pipeline)]


def fullest(candidate: Candidate) -> StageMemory:
    """Predict the peak memory of the fullest stage, which is the first of its kind."""
    return max(
        (stage_memory(candidate, kind.first) for kind in candidate.stages.kinds),
        key=lambda memory: memory.total,
    )


def stage_activations(layout: ResolvedLayout, stage: int, kind: StageKind) -> Activations:
    """Count the bytes of a stage's activations.

    Args:
        layout: of the run.
        stage: position on the pipeline axis.
        kind: of the stage.
    """
    compute_bytes, stages = layout.compute_bytes, layout.grid.pipeline
    kept = [int(_kept_elements(layout, chunk) * compute_bytes) for chunk in kind.chunks]
    # with so many micro-batches every schedule has reached its steady state
    micro_batches = min(layout.micro_batches, 2 * stages)
    head = head_product(layout)
    logits = head.rows * head.columns if any(chunk.has_head for chunk in kind.chunks) else 0
    boundary = layout.activation_traffic.boundary_bytes() if stages > 1 else 0.0
    return Activations(
        kept=_peak(stage, stages, layout.virtual_stages, micro_batches, tuple(kept)),
        # the head's output, its copy in fp32 for the loss, and its exponentials
        logits=logits * (compute_bytes + 8),
        working=int(_working_elements(layout, kind) * compute_bytes),
        exchange=int(2 * boundary),
    )


def _kept_elements(layout: ResolvedLayout, chunk: ModelChunk) -> float:
    """Count the elements that one micro-batch keeps in a model chunk."""
    is_recomputed = layout.recompute == "full"
    total = 0.0
    for block, count in chunk_blocks(layout, chunk):
        total += count * (block.input_elements if is_recomputed else block.kept_elements)
    if chunk.has_head:  # the last norm's input and output
        total += 2.0 * head_product(layout).rows * layout.model.hidden
    return total


@lru_cache(maxsize=4096)
def _peak(
    stage: int, stages: int, virtual_stages: int, micro_batches: int, kept: tuple[int, ...]
) -> int:
    """Return the most bytes of activations that a stage keeps at one moment of a step.

    A forward pass keeps the bytes of its model chunk, and its backward pass frees them.

    Args:
        stage: position on the pipeline axis.
        stages: pipeline ranks.
        virtual_stages: model chunks per stage.
        micro_batches: of a replica; enough to reach the schedule's steady state.
        kept: bytes that a micro-batch keeps, by virtual stage.
    """
    if virtual_stages == 1:
        return kept[0] * min(stages - stage, micro_batches)
    held = peak = 0
    for forward, chunk in stage_passes(stage, stages, virtual_stages, micro_batches):
        held += kept[chunk] if forward else -kept[chunk]
        peak = max(peak, held)
    return peak


def _working_elements(layout: ResolvedLayout, kind: StageKind) -> float:
    blocks = [block for chunk in kind.chunks for block, _ in chunk_blocks(layout, chunk)]
    recomputed = max(block.kept_elements for block in blocks) if layout.recompute == "full" else 0.0
    largest = max(p.rows * p.columns for block in blocks for p in block.products)
    return recomputed + 2.0 * largest


def _states(layout: ResolvedLayout, kind: StageKind) -> dict[str, int]:
    """Return what `ResolvedLayout.state_bytes` returns, but faster if no message is encoded."""
    factors, compute_bytes = layout.factors, layout.compute_bytes
    if layout.formats.encode(compute_bytes):
        return layout.state_bytes(kind.first)
    total, master = dict.fromkeys(STATES, 0), needs_master(compute_bytes)
    for size, count in kind.units:
        held = state_bytes(factors.padded(size), factors, compute_bytes, master)
        for name in STATES:
            total[name] += count * held[name]
    return {**total, "gathered": _gathered(layout, kind)}


def _gathered(layout: ResolvedLayout, kind: StageKind) -> int:
    """Return an upper bound on the bytes of parameters that are gathered at the same time."""
    factors = layout.factors
    if factors.params == 1:
        return 0
    units: Counter[int] = Counter()
    for size, count in kind.units:
        units[factors.padded(size)] += count
    shared = has_shared_table(layout.model, kind.chunks)
    return gathered_elements(units, layout.units_in_flight, shared) * layout.compute_bytes


def _reductions(layout: ResolvedLayout, kind: StageKind) -> int:
    """Return an upper bound on the bytes of a unit's new gradients and of their send buffers."""
    factors, largest = layout.factors, kind.units[-1][0]
    element_bytes = layout.formats.grads.element_bytes
    gradients = largest * layout.compute_bytes
    has_buffers = factors.grads > 1 or (factors.optimizer > 1 and element_bytes < FP32_BYTES)
    if not has_buffers:
        return gradients
    return gradients + int(layout.units_in_flight * largest * element_bytes)


def _host(candidate: Candidate, kind: StageKind) -> int:
    checkpoint = candidate.config.checkpoint
    if checkpoint.mode != "lazy" or candidate.config.cluster.device.kind == "cpu":
        return 0
    own = MASTER_AND_MOMENTS_BYTES * kind.elements // candidate.factors.optimizer
    return own if checkpoint.pool_bytes is None else min(own, checkpoint.pool_bytes)
