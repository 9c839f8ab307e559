"""Count the bytes of the activations of a stage, which do not depend on the sharding factors.

Activations are counted tensor by tensor (planner/block.py) for all micro-batches in flight, which
follow from the schedule's lists of actions. If a schedule splits backward passes, the factors of
the weight gradients, which are inputs and gradients of linear layers, are kept until they are
multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frontier_llm.geometry.message_memory import CPU_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.pipeline_schedule import held
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.block import Blocks, head_product, stage_blocks
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.timeline import shortened


@dataclass(frozen=True)
class Activations:
    """Bytes of a stage's activations, which do not depend on the sharding factors."""

    stage: int
    kept: int
    """Bytes kept for backward passes and weight gradients of all micro-batches in flight."""
    logits: int
    """Bytes of the logits, and of the part of them that the loss holds in fp32."""
    working: int
    """Bytes of the activations of a recomputed layer and of the gradients of the largest matrix
    product."""
    exchange: int
    """Bytes of the buffers for sends between stages."""
    per_layer: tuple[int, ...]
    """For each model chunk, the bytes that a backward pass frees with each layer, at least."""
    matrix: tuple[int, ...]
    """For each model chunk, the bytes of the gradient of the largest matrix in a layer."""


def least_activations(candidate: Candidate) -> tuple[Activations, ...]:
    """Return lower bounds on `kinds_activations`, without the lists of split backward passes."""
    return tuple(
        stage_activations(candidate, kind.first, kind, is_least=True)
        for kind in candidate.stages.kinds
    )


def stages_activations(candidate: Candidate) -> list[Activations]:
    """Return the activations of every stage."""
    layout, kinds = candidate.layout, candidate.stages
    of_kinds = {kind.first: stage_activations(candidate, kind.first, kind) for kind in kinds.kinds}
    sizes = {
        kind.first: _kept_bytes(layout, kind, stage_blocks(layout, kind.chunks))
        for kind in kinds.kinds
    }
    every = []
    for stage in range(layout.grid.pipeline):
        first = kinds.kind_of(stage).first
        kept = _peak(layout, stage, *sizes[first])
        every.append(replace(of_kinds[first], stage=stage, kept=kept))
    return every


def stage_activations(
    candidate: Candidate, stage: int, kind: StageKind, *, is_least: bool = False
) -> Activations:
    """Count the bytes of a stage's activations.

    With `is_least` the result is a lower bound, in which no weight gradients wait.
    """
    layout, on_cpu = candidate.layout, candidate.config.cluster.device.kind == "cpu"
    loss_chunk = CPU_LOSS_CHUNK_BYTES if on_cpu else LOSS_CHUNK_BYTES
    head = head_product(layout)
    has_head = any(chunk.has_head for chunk in kind.chunks)
    logits = head.rows * head.columns if has_head else 0
    boundary = layout.activation_traffic.boundary_bytes() if layout.grid.pipeline > 1 else 0.0
    of_chunks = stage_blocks(layout, kind.chunks)
    kept, factors = _kept_bytes(layout, kind, of_chunks)
    return Activations(
        stage=stage,
        kept=_peak(layout, stage, kept, factors, is_least=is_least),
        logits=logits * layout.compute_bytes + min(4 * logits, loss_chunk),
        working=int(_working_elements(layout, of_chunks) * layout.compute_bytes),
        exchange=int(2 * boundary),
        per_layer=tuple(_layer_bytes(layout, blocks) for blocks in of_chunks),
        matrix=tuple(_matrix_bytes(layout, blocks) for blocks in of_chunks),
    )


def _kept_bytes(
    layout: ResolvedLayout, kind: StageKind, of_chunks: Sequence[Blocks]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count the bytes that each virtual stage keeps of a micro-batch.

    The first ones are kept from the forward pass to the backward pass or the input gradients, the
    second ones from input gradients to weight gradients.
    """
    compute_bytes = layout.compute_bytes
    kept = [
        int(_kept_elements(layout, chunk, blocks) * compute_bytes)
        for chunk, blocks in zip(kind.chunks, of_chunks, strict=True)
    ]
    factors = [0] * len(kept)
    if layout.splits_backward:
        factors = [int(_factor_elements(blocks) * compute_bytes) for blocks in of_chunks]
    return tuple(kept), tuple(factors)


def _kept_elements(layout: ResolvedLayout, chunk: ModelChunk, blocks: Blocks) -> float:
    is_recomputed = layout.recompute == "full"
    total = 0.0
    for block, count in blocks:
        total += count * (block.input_elements if is_recomputed else block.kept_elements)
    if chunk.has_head:  # input and output of the last norm
        total += 2.0 * head_product(layout).rows * layout.model.hidden
    return total


def _layer_bytes(layout: ResolvedLayout, blocks: Blocks) -> int:
    """Return the bytes that the layer of a chunk with the fewest activations keeps."""
    is_recomputed = layout.recompute == "full"
    elements = [
        block.input_elements if is_recomputed else block.kept_elements for block, _ in blocks
    ]
    return int(min(elements, default=0) * layout.compute_bytes)


def _matrix_bytes(layout: ResolvedLayout, blocks: Blocks) -> int:
    sizes = [p.inner * p.columns for block, _ in blocks for p in block.products]
    return max(sizes, default=0) * layout.compute_bytes


def _factor_elements(blocks: Blocks) -> float:
    """Count the elements that a model chunk keeps for the weight gradients of a micro-batch."""
    return sum(count * block.factor_elements for block, count in blocks)


def _peak(
    layout: ResolvedLayout,
    stage: int,
    kept: tuple[int, ...],
    factors: tuple[int, ...],
    *,
    is_least: bool = False,
) -> int:
    """Return the peak bytes that a stage keeps for later actions of a step.

    `kept` and `factors` are the results of `_kept_bytes`. With `is_least`, passes are counted in
    their order before backward passes are split.
    """
    if layout.schedule_name == "1f1b" and not layout.splits_backward:
        return kept[0] * min(layout.grid.pipeline - stage, layout.micro_batches)
    # every schedule reaches its peak within the micro-batches of its steady state
    short = shortened(layout)
    return held(short.pass_order if is_least else short.schedule, stage, kept, factors)


def _working_elements(layout: ResolvedLayout, of_chunks: Sequence[Blocks]) -> float:
    """Return an upper bound on the elements of temporary tensors inside a pass.

    Of a layer that is recomputed for input gradients, the activations are replaced by the factors
    of its weight gradients, which `Activations.kept` contains.
    """
    blocks = [block for blocks in of_chunks for block, _ in blocks]
    recomputed = 0.0
    if layout.recompute == "full":
        replaced = 1 if layout.splits_backward else 0
        recomputed = max(
            max(0.0, block.kept_elements - replaced * block.factor_elements) for block in blocks
        )
    largest_output = max(
        product.rows * product.columns for block in blocks for product in block.products
    )
    return recomputed + 2.0 * largest_output
