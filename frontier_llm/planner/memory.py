"""Predict the peak memory of a rank of each pipeline stage in bytes, by category.

Model states are exact, because geometry/ counts the buffers that sharding/ allocates. Activations
are counted tensor by tensor (planner/block.py) for all micro-batches in flight, which follow from
the schedule's lists of actions. If a schedule splits backward passes, the factors of the weight
gradients, which are inputs and gradients of linear layers, are kept until they are multiplied.
Temporary buffers are upper bounds. Slack, the memory that the allocator holds unused, is a share of
all temporary memory. The communicators are those that the groups of the layout create
(geometry/communicators.py).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.geometry.communicators import Communicator
from frontier_llm.geometry.message_memory import CPU_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES
from frontier_llm.geometry.model_chunks import ModelChunk, has_shared_table
from frontier_llm.geometry.pipeline_schedule import held
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import (
    FP32_BYTES,
    gathered_elements,
    needs_master,
    state_bytes,
)
from frontier_llm.planner.backward_peak import BackwardPeak
from frontier_llm.planner.block import chunk_blocks, head_product
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.planner.timeline import shortened
from frontier_llm.units import GIB, MIB

STATES = ("parameters", "gradients", "master", "moments")
"""Categories that stay allocated during the whole run. Their predictions are exact."""
MASTER_AND_MOMENTS_BYTES = 12
"""Bytes per element in a checkpoint: an fp32 master weight and two fp32 moments."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted peak memory of a rank of one stage."""

    stage: int
    """Index of the stage."""
    by_category: dict[str, int]
    """Bytes of device memory by category, such as `activations`."""
    host_bytes: int
    """Bytes of page-locked host memory for copies of states that a checkpoint has not written."""

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
    """Bytes of a stage's activations, which do not depend on the sharding factors."""

    stage: int
    """Index of the stage."""
    kept: int
    """Bytes kept for backward passes and weight gradients of all micro-batches in flight."""
    logits: int
    """Bytes of the logits, and of the part of them that the loss holds in fp32."""
    working: int
    """Bytes of the activations of a recomputed layer and of the gradients of the largest matrix
    product."""
    exchange: int
    """Bytes of the buffers for sends between stages."""


def stage_memory(
    candidate: Candidate, stage: int, activations: Activations | None = None
) -> StageMemory:
    """Predict the peak memory of a stage's ranks.

    Args:
        candidate: the layout.
        stage: position on the pipeline axis.
        activations: bytes of the stage's activations, if they are known already.
    """
    layout, kind = candidate.layout, candidate.stages.kind_of(stage)
    activations = activations or stage_activations(candidate, stage, kind)
    by_category = _states(layout, kind)
    if layout.splits_backward:
        freed, logits, working = 0, activations.logits, activations.working
        reductions = _reductions(candidate, kind)
    else:
        moment = BackwardPeak(candidate, kind, activations.logits, activations.working).fullest()
        freed, logits, working = moment.freed, moment.logits, moment.working
        reductions = moment.reductions
    temporary = {
        "reductions": reductions,
        "activations": activations.kept - freed,
        "logits": logits,
        "working": working,
        "exchange": activations.exchange,
    }
    calibration = candidate.config.cluster.device.calibration
    slack = calibration.slack_share * (by_category["gathered"] + sum(temporary.values()))
    by_category |= temporary
    by_category |= runtime_bytes(calibration, candidate.stages.communicators(layout.factors, stage))
    by_category["slack"] = int(slack)
    return StageMemory(stage, by_category, _host_bytes(candidate, kind))


def runtime_bytes(
    calibration: CalibrationConfig, created: Iterable[Communicator]
) -> dict[str, int]:
    """Return the device memory that is no tensor of the program, by category.

    Args:
        calibration: of the cluster's device.
        created: the communicators of a rank.
    """
    buffers = sum(communicator.buffer_bytes(calibration.channels) for communicator in created)
    return {
        "reserved": int(calibration.reserved_gib * GIB),
        "communicators": buffers,
        "workspace": int(calibration.workspace_mib * MIB),
    }


def stages_memory(candidate: Candidate) -> list[StageMemory]:
    """Predict the peak memory of every stage."""
    return [stage_memory(candidate, stage) for stage in range(candidate.grid.pipeline)]


def fullest(candidate: Candidate) -> StageMemory:
    """Predict the peak memory of the fullest stage."""
    return fullest_of(candidate, kinds_activations(candidate))


def fullest_of(candidate: Candidate, activations: Sequence[Activations]) -> StageMemory:
    """Predict the peak memory of the fullest stage.

    Args:
        candidate: the layout.
        activations: those of each kind of stage (`kinds_activations`).
    """
    return max(
        (stage_memory(candidate, kept.stage, kept) for kept in activations),
        key=lambda memory: memory.total,
    )


def kinds_activations(candidate: Candidate) -> tuple[Activations, ...]:
    """Return the activations of the fullest stage of each kind.

    If backward passes are whole, this is the first stage of the kind.
    """
    layout, kinds = candidate.layout, candidate.stages
    stages = [kind.first for kind in kinds.kinds]
    if layout.splits_backward:
        stages = list(range(layout.grid.pipeline))
    fullest: dict[int, tuple[int, Activations]] = {}
    for stage in stages:
        kind = kinds.kind_of(stage)
        activations = stage_activations(candidate, stage, kind)
        total = stage_memory(candidate, stage, activations).total
        if kind.first not in fullest or total > fullest[kind.first][0]:
            fullest[kind.first] = total, activations
    return tuple(fullest[kind.first][1] for kind in kinds.kinds)


def least_activations(candidate: Candidate) -> tuple[Activations, ...]:
    """Return lower bounds on `kinds_activations`, without the lists of split backward passes."""
    return tuple(
        stage_activations(candidate, kind.first, kind, is_least=True)
        for kind in candidate.stages.kinds
    )


def stage_activations(
    candidate: Candidate, stage: int, kind: StageKind, *, is_least: bool = False
) -> Activations:
    """Count the bytes of a stage's activations.

    Args:
        candidate: the layout.
        stage: position on the pipeline axis.
        kind: kind of this stage.
        is_least: whether to return a lower bound, in which no weight gradients wait.
    """
    layout, on_cpu = candidate.layout, candidate.config.cluster.device.kind == "cpu"
    compute_bytes, stages = layout.compute_bytes, layout.grid.pipeline
    loss_chunk = CPU_LOSS_CHUNK_BYTES if on_cpu else LOSS_CHUNK_BYTES
    kept = [int(_kept_elements(layout, chunk) * compute_bytes) for chunk in kind.chunks]
    factors = [0] * len(kept)
    if layout.splits_backward and not is_least:
        factors = [int(size * compute_bytes) for size in _factor_elements(layout, kind)]
    head = head_product(layout)
    has_head = any(chunk.has_head for chunk in kind.chunks)
    logits = head.rows * head.columns if has_head else 0
    boundary = layout.activation_traffic.boundary_bytes() if stages > 1 else 0.0
    return Activations(
        stage=stage,
        kept=_peak(layout, stage, tuple(kept), tuple(factors), is_least=is_least),
        logits=logits * compute_bytes + min(4 * logits, loss_chunk),
        working=int(_working_elements(layout, kind) * compute_bytes),
        exchange=int(2 * boundary),
    )


def _kept_elements(layout: ResolvedLayout, chunk: ModelChunk) -> float:
    """Count the elements that a model chunk keeps for the backward pass of one micro-batch."""
    is_recomputed = layout.recompute == "full"
    total = 0.0
    for block, count in chunk_blocks(layout, chunk):
        total += count * (block.input_elements if is_recomputed else block.kept_elements)
    if chunk.has_head:  # input and output of the last norm
        total += 2.0 * head_product(layout).rows * layout.model.hidden
    return total


def _factor_elements(layout: ResolvedLayout, kind: StageKind) -> Iterator[float]:
    """Yield the elements that each model chunk keeps for the weight gradients of a micro-batch."""
    for chunk in kind.chunks:
        yield sum(count * block.factor_elements for block, count in chunk_blocks(layout, chunk))


def _peak(
    layout: ResolvedLayout,
    stage: int,
    kept: tuple[int, ...],
    factors: tuple[int, ...],
    *,
    is_least: bool,
) -> int:
    """Return the peak bytes that a stage keeps for later actions of a step.

    Args:
        layout: layout of the run.
        stage: position on the pipeline axis.
        kept: for each virtual stage, the bytes kept from the forward pass of a micro-batch until
            its backward pass or its input gradients.
        factors: for each virtual stage, the bytes kept from input gradients to weight gradients.
        is_least: whether passes are counted in their order before backward passes are split.
    """
    if layout.schedule_name == "1f1b" and not layout.splits_backward:
        return kept[0] * min(layout.grid.pipeline - stage, layout.micro_batches)
    # every schedule reaches its peak within the micro-batches of its steady state
    short = shortened(layout)
    return held(short.pass_order if is_least else short.schedule, stage, kept, factors)


def _working_elements(layout: ResolvedLayout, kind: StageKind) -> float:
    """Return an upper bound on the elements of temporary tensors inside a pass.

    Of a layer that is recomputed for input gradients, the activations are replaced by the factors
    of its weight gradients, which `Activations.kept` contains.
    """
    blocks = [block for chunk in kind.chunks for block, _ in chunk_blocks(layout, chunk)]
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


def _states(layout: ResolvedLayout, kind: StageKind) -> dict[str, int]:
    """Return the bytes of model states by category, including gathered parameters.

    The result equals `ResolvedLayout.state_bytes`. If no message is encoded, it is computed here
    from the number of equal units, which is faster.
    """
    factors, compute_bytes = layout.factors, layout.compute_bytes
    if layout.formats.any_encoded(compute_bytes):
        return layout.state_bytes(kind.first)
    total, master = dict.fromkeys(STATES, 0), needs_master(compute_bytes)
    for size, count in kind.units:
        unit_bytes = state_bytes(factors.padded(size), factors, compute_bytes, master)
        for name in STATES:
            total[name] += count * unit_bytes[name]
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


def _reductions(candidate: Candidate, kind: StageKind) -> int:
    """Return an upper bound on the bytes of new gradients and of the buffers that send them.

    On an NVIDIA GPU the gradients of matrices are computed in the buffers. Other devices may need a
    tensor for a gradient before it is added (device/accumulate.py). If gradients are sharded and
    backward passes are split, the buffer of a unit may have gradients of norms and biases while the
    weight gradients of the unit wait.
    """
    config, layout = candidate.config, candidate.layout
    factors, largest_unit = layout.factors, kind.units[-1][0]
    fuses = config.sharding.fused_gradients and config.kernels != "compiled"
    in_buffer = fuses and config.cluster.device.kind == "cuda"
    gradients = (kind.largest_table if in_buffer else largest_unit) * layout.compute_bytes
    element_bytes = layout.formats.grads.element_bytes
    buffered = 0
    if factors.grads > 1:  # some are written to while the others are sent
        written = kind.elements if layout.splits_backward else largest_unit
        buffered = layout.units_in_flight * largest_unit + written
    elif factors.optimizer > 1 and element_bytes < FP32_BYTES:
        buffered = layout.units_in_flight * largest_unit
    return gradients + int(buffered * element_bytes)


def _host_bytes(candidate: Candidate, kind: StageKind) -> int:
    """Return the host memory that a lazy checkpoint needs per rank; 0 without one or on a CPU."""
    checkpoint = candidate.config.checkpoint
    if checkpoint.mode != "lazy" or candidate.config.cluster.device.kind == "cpu":
        return 0
    shard_bytes = MASTER_AND_MOMENTS_BYTES * kind.elements // candidate.factors.optimizer
    limit = checkpoint.pool_bytes
    return shard_bytes if limit is None else min(shard_bytes, limit)
