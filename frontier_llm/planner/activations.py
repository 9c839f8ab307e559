"""Count the bytes of the activations of a stage, which do not depend on the sharding factors.

Activations are counted tensor by tensor (planner/block.py) for all micro-batches in flight, which
follow from the schedule's lists of actions. If a schedule splits backward passes, the factors of
the weight gradients, which are inputs and gradients of linear layers, are kept until they are
multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frontier_llm.geometry.message_memory import CPU_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES
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
    passes: tuple[int, ...]
    """For each model chunk, the bytes kept from the forward pass of a micro-batch until its
    backward pass or its input gradients."""
    factors: tuple[int, ...]
    """For each model chunk, the bytes kept from input gradients to weight gradients."""
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
    """Return the activations of every stage, which differ in a kind of stages only in `kept`."""
    kinds = candidate.stages
    of_kinds = [stage_activations(candidate, kind.first, kind) for kind in kinds.kinds]
    return [
        replace(of_kind, stage=stage, kept=_peak(candidate.layout, stage, of_kind))
        for stage, of_kind in enumerate(kinds.of_stages(of_kinds))
    ]


def stage_activations(
    candidate: Candidate, stage: int, kind: StageKind, *, is_least: bool = False
) -> Activations:
    """Count the bytes of a stage's activations.

    With `is_least` the result is a lower bound, in which no weight gradients wait.
    """
    layout, on_cpu = candidate.layout, candidate.config.cluster.device.kind == "cpu"
    compute_bytes, of_chunks = layout.compute_bytes, stage_blocks(layout, kind.chunks)
    loss_chunk = CPU_LOSS_CHUNK_BYTES if on_cpu else LOSS_CHUNK_BYTES
    head = head_product(layout)
    has_head = any(chunk.has_head for chunk in kind.chunks)
    logits = head.rows * head.columns if has_head else 0
    boundary = layout.activation_traffic.boundary_bytes() if layout.grid.pipeline > 1 else 0.0
    passes, factors, per_layer, matrix = list[int](), list[int](), list[int](), list[int]()
    for chunk, blocks in zip(kind.chunks, of_chunks, strict=True):
        kept = [
            block.input_elements if layout.recompute == "full" else block.kept_elements
            for block, _ in blocks
        ]
        elements = sum(count * of_layer for (_, count), of_layer in zip(blocks, kept, strict=True))
        if chunk.has_head:  # input and output of the last norm
            elements += 2.0 * head.rows * layout.model.hidden
        split = sum(count * block.factor_elements for block, count in blocks)
        sizes = [p.inner * p.columns for block, _ in blocks for p in block.products]
        passes.append(int(elements * compute_bytes))
        factors.append(int(split * compute_bytes) if layout.splits_backward else 0)
        per_layer.append(int(min(kept, default=0) * compute_bytes))
        matrix.append(max(sizes, default=0) * compute_bytes)
    found = Activations(
        stage=stage,
        kept=0,
        logits=logits * compute_bytes + min(4 * logits, loss_chunk),
        working=int(_working_elements(layout, of_chunks) * compute_bytes),
        exchange=int(2 * boundary),
        passes=tuple(passes),
        factors=tuple(factors),
        per_layer=tuple(per_layer),
        matrix=tuple(matrix),
    )
    return replace(found, kept=_peak(layout, stage, found, is_least=is_least))


def _peak(layout: ResolvedLayout, stage: int, sizes: Activations, *, is_least: bool = False) -> int:
    """Return the peak bytes that a stage keeps for later actions of a step.

    With `is_least`, passes are counted in their order before backward passes are split.
    """
    if layout.schedule_name == "1f1b" and not layout.splits_backward:
        return sizes.passes[0] * min(layout.grid.pipeline - stage, layout.micro_batches)
    # every schedule reaches its peak within the micro-batches of its steady state
    short = shortened(layout)
    schedule = short.pass_order if is_least else short.schedule
    return held(schedule, stage, sizes.passes, sizes.factors)


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
