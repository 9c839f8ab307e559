"""Predict the peak memory of a rank of each pipeline stage in bytes, by category.

Model states are exact, because geometry/ counts the buffers that sharding/ allocates. Activations
are counted for all micro-batches in flight. Temporary buffers are upper bounds. Slack, the memory
that the allocator holds unused, is a share of all temporary memory.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.host_pool import STATE_BYTES, HostPool, copied_bytes, host_pool
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import (
    FP32_BYTES,
)
from frontier_llm.planner.block import Activations, stage_activations, stages_activations
from frontier_llm.planner.candidate import Candidate, StageKind, UnitRun
from frontier_llm.units import GIB, MIB

STATES = ("parameters", "gradients", "master", "moments")
"""Categories that stay allocated during the whole run. Their predictions are exact."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted peak memory of a rank of one stage."""

    stage: int
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
    """Predict the peak memory of a stage's ranks; its activations may be known already."""
    kind = candidate.stages.by_stage[stage]
    activations = activations or stage_activations(candidate, stage, kind)
    by_category = device_bytes(candidate, kind, activations)
    pool, copies = host_memory(candidate.config, candidate.layout, kind.first, by_category)
    return StageMemory(stage, by_category, pool.size + copies)


def device_bytes(candidate: Candidate, kind: StageKind, activations: Activations) -> dict[str, int]:
    """Return the bytes of `StageMemory.by_category` of the stage of these activations."""
    layout = candidate.layout
    by_category = dict(known_states(candidate, kind, layout.factors))
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
    stage, channels = activations.stage, calibration.channels
    buffers = candidate.stages.communicator_bytes(layout, stage, channels)
    by_category |= runtime_bytes(calibration, buffers)
    by_category["slack"] = int(slack)
    return by_category


def host_memory(
    config: RunConfig, layout: ResolvedLayout, stage: int, states: Mapping[str, int]
) -> tuple[HostPool, int]:
    """Return the host memory for checkpoints of a rank whose states lie on no lower rank's node.

    It consists of the buffers, and of the most bytes of the files of `recovery.partner_copies`.
    `states` are the bytes of the rank's states by category.
    """
    if layout.optimizer.name == "adamw":  # a search need not count each unit
        saved_bytes = states["moments"] // (2 * FP32_BYTES) * STATE_BYTES
    else:
        saved_bytes = layout.saved_bytes(stage)
    replicas = layout.factors.data // layout.factors.optimizer
    pool = host_pool(config.checkpoint, saved_bytes, replicas)
    return pool, copied_bytes(config, saved_bytes)


def runtime_bytes(calibration: CalibrationConfig, buffers: int) -> dict[str, int]:
    """Return the device memory that is no tensor of the program; `buffers` of communicators."""
    return {
        "reserved": int(calibration.reserved_gib * GIB),
        "communicators": buffers,
        "workspace": int(calibration.workspace_mib * MIB),
    }


def stages_memory(
    candidate: Candidate, activations: Sequence[Activations] | None = None
) -> list[StageMemory]:
    """Predict the peak memory of every stage, whose activations may be known already."""
    of_stages = activations or stages_activations(candidate)
    return [stage_memory(candidate, of_stage.stage, of_stage) for of_stage in of_stages]


def fullest(candidate: Candidate) -> StageMemory:
    """Predict the peak memory of the fullest stage."""
    return fullest_of(candidate, kinds_activations(candidate))


def fullest_of(candidate: Candidate, activations: Sequence[Activations]) -> StageMemory:
    """Predict the peak memory of the fullest stage from the activations of each kind of stage."""
    return max(
        (stage_memory(candidate, kept.stage, kept) for kept in activations),
        key=lambda memory: memory.total,
    )


def known_states(candidate: Candidate, kind: StageKind, factors: Factors) -> dict[str, int]:
    """Return the bytes of model states by category; a search counts them once."""
    layout = candidate.layout
    return candidate.stages.once(
        ("states", factors, kind.first),
        lambda: layout.with_factors(factors).units_bytes(kind.layouts, kind.chunks),
    )


def kinds_activations(
    candidate: Candidate, of_stages: Sequence[Activations] | None = None
) -> tuple[Activations, ...]:
    """Return the activations of the fullest stage of each kind; those of all stages may be known.

    If backward passes are whole, this is the first stage of the kind.
    """
    layout, kinds = candidate.layout, candidate.stages
    if not layout.splits_backward:
        return tuple(stage_activations(candidate, kind.first, kind) for kind in kinds.kinds)
    # Stages of a kind differ only in their kept activations and in their communicators.
    fullest: dict[tuple[int, int], Activations] = {}
    channels = candidate.config.cluster.device.calibration.channels
    for activations in of_stages or stages_activations(candidate):
        buffers = kinds.communicator_bytes(layout, activations.stage, channels)
        key = kinds.by_stage[activations.stage].first, buffers
        if key not in fullest or activations.kept > fullest[key].kept:
            fullest[key] = activations
    return tuple(
        max(
            (activations for (first, _), activations in fullest.items() if first == kind.first),
            key=lambda activations: stage_memory(candidate, activations.stage, activations).total,
        )
        for kind in kinds.kinds
    )


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


class Moment(NamedTuple):
    """Bytes at one moment of a backward pass."""

    freed: int
    """Activations of this pass that are freed already."""
    reductions: int
    """New gradients, and the buffers of reductions."""
    logits: int
    working: int

    @property
    def added(self) -> int:
        """Bytes that the stage holds in addition to all kept activations."""
        return self.reductions + self.logits + self.working - self.freed


class BackwardPeak:
    """The moments of the backward passes of one kind of stage, with whole backward passes.

    A backward pass frees the activations of one layer after the other. At the same time it needs
    memory for new gradients and for the reductions that are under way. The logits, the temporary
    tensors of a layer and the gradient of a table do not exist at the same moment, so their sizes
    do not add up.
    """

    def __init__(self, candidate: Candidate, kind: StageKind, activations: Activations) -> None:
        self._candidate, self._layout, self._kind = candidate, candidate.layout, kind
        self._activations = activations
        # bytes of buffers by the elements of a unit, as most units are equal
        self._buffer_bytes: dict[int, tuple[int, int]] = {}

    def fullest(self) -> Moment:
        """Return the moment with the most memory."""
        kind, per_layer = self._kind, self._activations.per_layer
        distinct = {  # most chunks of a stage have equal layers
            (units, per_layer[index], kind.chunks[index].has_head): index
            for index, units in enumerate(kind.chunk_units)
        }
        return max(
            (moment for index in distinct.values() for moment in self._moments(index)),
            key=lambda moment: moment.added,
        )

    def _moments(self, index: int) -> Iterator[Moment]:
        """Yield the moments of the backward pass of a model chunk, of equal layers only the first.

        After a few equal layers, the buffers of reductions do not grow any more.
        """
        chunk, runs = self._kind.chunks[index], self._kind.chunk_units[index]
        hops, in_flight = self._hops, self._layout.units_in_flight
        per_layer = self._activations.per_layer[index]
        logits = self._activations.logits if chunk.has_head else 0
        working, under_way, freed = self._activations.working, deque(self._left_over), 0
        standing = self._tied_bytes(index)  # of a table that is also the head
        if logits:
            yield Moment(0, sum(under_way) + standing, logits, 0)
        for run in reversed(runs):
            is_layer = run.what == "layer"
            written, sent = self._buffers(run.elements)
            logits = logits if run.what == "head" else 0
            limit = min(hops, in_flight) + 2 if sent else 1
            for number in range(min(run.count, limit)):
                before = freed + number * per_layer if is_layer else freed
                now = standing + sum(under_way) + written + self._gradient_bytes(run, index)
                yield Moment(before, now, logits, working if is_layer else 0)
                while len(under_way) >= hops:  # each start ends a hop of every reduction
                    under_way.popleft()
                under_way.append(sent)
                yield Moment(before, standing + sum(under_way), logits, 0)
                while len(under_way) > in_flight:
                    under_way.popleft()
            freed += run.count * per_layer if is_layer else 0

    @cached_property
    def _left_over(self) -> list[int]:
        """The buffers of reductions that an earlier backward pass has started.

        Reductions of sharded gradients end during the next backward pass: a reduction is waited for
        when `units_in_flight` later ones have started, or as many as it has collectives.
        """
        layout = self._layout
        if layout.factors.grads == 1 or layout.micro_batches * layout.virtual_stages == 1:
            return []
        limit = min(self._hops, layout.units_in_flight)
        last = (
            islice((run.elements for run in runs for _ in range(run.count)), limit)
            for runs in dict.fromkeys(self._kind.chunk_units)
        )
        return max(([self._buffers(unit)[1] for unit in units] for units in last), key=sum)

    @cached_property
    def _hops(self) -> int:
        """The largest number of collectives in which the gradients of a unit are reduced."""
        return max(1, len(self._layout.factors.collective_hops))

    def _buffers(self, elements: int) -> tuple[int, int]:
        if elements not in self._buffer_bytes:
            self._buffer_bytes[elements] = self._count_buffers(elements)
        return self._buffer_bytes[elements]

    def _count_buffers(self, elements: int) -> tuple[int, int]:
        """Return the bytes of a unit's buffer while it is written, and during its reduction.

        Buffers of quantised gradients are message buffers (geometry/state_memory.py). A
        reduce-scatter by the communication library receives a part, in fp32. Otherwise a rank
        receives the parts of all ranks (collectives/primitives.py).
        """
        layout, config = self._layout, self._candidate.config
        factors, message_format = layout.factors, layout.formats.grads.widest
        elements = factors.padded(elements)
        if message_format.is_quantised or factors.optimizer == 1:
            return 0, 0
        whole = int(elements * message_format.element_bytes)
        by_pairs = config.collectives.pairwise and config.cluster.device.kind == "cpu"
        is_fp32 = message_format.element_bytes == FP32_BYTES
        received = whole
        if is_fp32 and not by_pairs:
            received = whole // factors.collective_hops[0].width if factors.grads > 1 else 0
        if factors.grads > 1:
            return whole, whole + received
        return 0, received if is_fp32 else whole + received

    def _gradient_bytes(self, run: UnitRun, index: int) -> int:
        """Return the bytes of a gradient before it is added to its buffer.

        The gradient of a table is a tensor. Products of other gradients are computed in the buffers
        if the device adds to fp32 (device/accumulate.py); else each is a tensor. Compiled layers
        return all gradients of a layer together.
        """
        config, compute_bytes = self._candidate.config, self._layout.compute_bytes
        if run.what == "table" or config.kernels == "compiled":
            return run.elements * compute_bytes
        adds_to_fp32 = config.cluster.device.kind == "cuda" or compute_bytes == FP32_BYTES
        if config.sharding.fused_gradients and adds_to_fp32:
            return 0
        if run.what != "layer":
            return run.elements * compute_bytes
        return self._activations.matrix[index]

    def _tied_bytes(self, index: int) -> int:
        """Return the bytes of the gradient of a table that is also the head, and of its buffer."""
        has_own_head = any(run.what == "head" for run in self._kind.chunk_units[index])
        if has_own_head or not self._kind.chunks[index].has_head:
            return 0
        table = self._kind.largest_table
        return self._buffers(table)[0] + table * self._layout.compute_bytes
