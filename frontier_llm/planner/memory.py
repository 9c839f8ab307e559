"""Predict the peak memory of a rank of each pipeline stage in bytes, by category.

Model states are exact, because geometry/ counts the buffers that sharding/ allocates. Activations
are counted for all micro-batches in flight (planner/activations.py). Temporary buffers are upper
bounds. Slack, the memory that the allocator holds unused, is a share of all temporary memory. The
communicators are those that the groups of the layout create (geometry/communicators.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.communicators import Communicator
from frontier_llm.geometry.host_pool import STATE_BYTES, HostPool, copied_bytes, host_pool
from frontier_llm.geometry.model_chunks import has_shared_table
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import (
    FP32_BYTES,
    gathered_elements,
    needs_master,
    state_bytes,
)
from frontier_llm.planner.activations import Activations, stage_activations, stages_activations
from frontier_llm.planner.backward_peak import BackwardPeak
from frontier_llm.planner.candidate import Candidate, StageKind
from frontier_llm.units import GIB, MIB

STATES = ("parameters", "gradients", "master", "moments")
"""Categories that stay allocated during the whole run. Their predictions are exact."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted peak memory of a rank of one stage."""

    stage: int
    """Index of the stage."""
    by_category: dict[str, int]
    """Bytes of device memory by category, such as `activations`."""
    host_bytes: int
    """Bytes of host memory for the checkpoints of all tiers (geometry/host_pool.py): the buffers,
    exactly, which are page-locked if the device is a GPU, and at most as many bytes of copies in
    memory (`recovery.partner_copies`)."""

    @property
    def total(self) -> int:
        """Bytes of device memory in all categories."""
        return sum(self.by_category.values())

    @property
    def largest(self) -> str:
        """Name of the largest category."""
        return max(self.by_category, key=lambda name: self.by_category[name])


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
    states = candidate.stages.state_bytes(layout.factors, kind, lambda: _states(layout, kind))
    by_category = dict(states)
    if layout.splits_backward:
        freed, logits, working = 0, activations.logits, activations.working
        reductions = _reductions(candidate, kind)
    else:
        moment = BackwardPeak(candidate, kind, activations).fullest()
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
    pool, copies = host_memory(candidate.config, layout, kind.first, states)
    return StageMemory(stage, by_category, pool.size + copies)


def host_memory(
    config: RunConfig, layout: ResolvedLayout, stage: int, states: Mapping[str, int]
) -> tuple[HostPool, int]:
    """Return the host memory for checkpoints of a rank whose states lie on no lower rank's node.

    Args:
        config: configuration of the run.
        layout: the layout.
        stage: position on the pipeline axis.
        states: bytes of the rank's states by category.

    Returns:
        The buffers; and the most bytes of the files of `recovery.partner_copies`.
    """
    if layout.optimizer.name == "adamw":  # a search need not count each unit
        saved_bytes = states["moments"] // (2 * FP32_BYTES) * STATE_BYTES
    else:
        saved_bytes = layout.saved_bytes(stage)
    replicas = layout.factors.data // layout.factors.optimizer
    pool = host_pool(config.checkpoint, saved_bytes, replicas)
    return pool, copied_bytes(config, saved_bytes)


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


def stages_memory(
    candidate: Candidate, activations: Sequence[Activations] | None = None
) -> list[StageMemory]:
    """Predict the peak memory of every stage.

    Args:
        candidate: the layout.
        activations: those of every stage (`stages_activations`), if they are known already.
    """
    of_stages = activations or stages_activations(candidate)
    return [stage_memory(candidate, of_stage.stage, of_stage) for of_stage in of_stages]


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


def kinds_activations(
    candidate: Candidate, of_stages: Sequence[Activations] | None = None
) -> tuple[Activations, ...]:
    """Return the activations of the fullest stage of each kind.

    If backward passes are whole, this is the first stage of the kind.

    Args:
        candidate: the layout.
        of_stages: the activations of every stage, if they are known already.
    """
    layout, kinds = candidate.layout, candidate.stages
    if not layout.splits_backward:
        return tuple(stage_activations(candidate, kind.first, kind) for kind in kinds.kinds)
    # Stages of a kind differ only in their kept activations and in their communicators.
    fullest: dict[tuple[int, int], Activations] = {}
    calibration = candidate.config.cluster.device.calibration
    for activations in of_stages or stages_activations(candidate):
        created = kinds.communicators(layout.factors, activations.stage)
        buffers = runtime_bytes(calibration, created)["communicators"]
        key = kinds.kind_of(activations.stage).first, buffers
        if key not in fullest or activations.kept > fullest[key].kept:
            fullest[key] = activations
    return tuple(
        max(
            (activations for (first, _), activations in fullest.items() if first == kind.first),
            key=lambda activations: stage_memory(candidate, activations.stage, activations).total,
        )
        for kind in kinds.kinds
    )


def _states(layout: ResolvedLayout, kind: StageKind) -> dict[str, int]:
    """Return the bytes of model states by category, including gathered parameters.

    The result equals `ResolvedLayout.state_bytes`. For AdamW without encoded messages, it is
    computed here from the number of equal units, which is faster.
    """
    factors, compute_bytes = layout.factors, layout.compute_bytes
    if layout.optimizer.name != "adamw" or layout.formats.any_encoded(compute_bytes):
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
    element_bytes = layout.formats.grads.widest.element_bytes
    buffered = 0
    if factors.grads > 1:  # some are written to while the others are sent
        written = kind.elements if layout.splits_backward else largest_unit
        buffered = layout.units_in_flight * largest_unit + written
    elif factors.optimizer > 1 and element_bytes < FP32_BYTES:
        buffered = layout.units_in_flight * largest_unit
    return gradients + int(buffered * element_bytes)
