"""Builds every pipeline stage of a run without memory, and compares it with the plan.

`plan=dry_run` calls this, to check a layout of thousands of ranks on one machine. This process
takes the role of the first rank of each stage in turn. It builds the real modules on torch's meta
device, which has no memory, and uses torch's fake process group at the full number of ranks. Names,
shapes and bytes of the states must be equal to those that planner/ predicts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from frontier_llm.device.kernels import TORCH
from frontier_llm.errors import FrontierError
from frontier_llm.geometry.flat_layout import FlatLayout, unit_runs
from frontier_llm.geometry.grid import Coordinates
from frontier_llm.geometry.inventory import chunk_parameters, count_parameters
from frontier_llm.geometry.state_memory import (
    needs_master,
    rank_state_bytes,
    updates_whole_matrices,
)
from frontier_llm.model.build import build_model
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import destroy_groups, make_groups
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.memory import STATES, stage_memory
from frontier_llm.protocols import ParameterRecord
from frontier_llm.sharding.factored_moments import count_sums
from frontier_llm.sharding.unit import group_records

META = torch.device("meta")
"""torch's device for tensors without memory."""


class DryRunError(FrontierError):
    """A built stage differs from the plan, which is an error of this program."""


@dataclass(frozen=True)
class BuiltStage:
    """Sizes of a stage that was built."""

    stage: int
    parameters: int
    """Number of parameters that one tensor-parallel rank of the stage holds."""
    counted: int
    """Number of the model's parameters that this stage counts. Each parameter is counted on one
    stage, so the sum over all stages is the size of the model."""
    state_bytes: dict[str, int]
    """Bytes that a rank keeps between steps, by category of planner/memory.py."""
    peak_bytes: int
    """Predicted peak memory of a rank."""


def dry_run(
    candidate: Candidate, stages: Sequence[int], progress: Callable[[float], None]
) -> list[BuiltStage]:
    """Build stages one after the other; raise a DryRunError if one differs from the plan.

    The process must have no process group, and has none afterwards. The candidate has the full
    world size. `progress` is called before each stage with the completed fraction, from 0 to 1.
    """
    megatron_cpu.install()
    built = []
    for done, stage in enumerate(stages):
        progress(done / len(stages))
        with _as_first_rank_of(candidate, stage):
            built.append(_build(candidate, stage))
    return built


@contextmanager
def _as_first_rank_of(candidate: Candidate, stage: int) -> Iterator[None]:
    """Make this process the first rank of a stage, in a world of fake ranks."""
    grid = candidate.grid
    rank = grid.rank(Coordinates(tensor=0, data=0, pipeline=stage))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
    try:
        yield
    finally:
        destroy_groups()


def check_parameter_count(candidate: Candidate, built: Sequence[BuiltStage]) -> None:
    """Raise a DryRunError unless the stages together have the parameters of the model."""
    config = candidate.config
    expected = count_parameters(config.model, config.data.sequence_length)
    counted = sum(stage.counted for stage in built)
    if counted != expected:
        raise DryRunError(f"all stages count {counted} parameters, the model has {expected}")


def _build(candidate: Candidate, stage: int) -> BuiltStage:
    config = candidate.config
    groups = make_groups(candidate.grid, candidate.layout.head_stage)
    model = build_model(candidate.layout, groups, META, TORCH, config.trainer.seed)
    _compare_names(candidate, stage, model.records)
    built_bytes = _state_bytes_of(candidate, stage, model.records)
    planned = stage_memory(candidate, stage)
    for name in STATES:
        if built_bytes[name] != planned.by_category[name]:
            raise DryRunError(
                f"stage {stage} would allocate {built_bytes[name]} bytes of {name}, "
                f"{planned.by_category[name]} were planned"
            )
    return BuiltStage(
        stage=stage,
        parameters=sum(record.parameter.numel() for record in model.records),
        counted=_counted(model.records),
        state_bytes=built_bytes,
        peak_bytes=planned.total,
    )


def _compare_names(candidate: Candidate, stage: int, records: Sequence[ParameterRecord]) -> None:
    """Compare the names and shapes of built parameters with those of geometry/inventory.py."""
    layout = candidate.layout
    expected = {  # a set, because a unit holds a table once that two chunks read
        (shape.unit, shape.name, shape.shape)
        for chunk in layout.chunks_of_stage(stage)
        for shape in chunk_parameters(layout.model, chunk, layout.sequence_length)
    }
    found = Counter(
        (record.unit, placement.name, tuple(placement.global_shape))
        for record in records
        for placement in record.placements
    )
    if found != Counter(expected):
        differing = sorted((found - Counter(expected)) + (Counter(expected) - found))[:4]
        raise DryRunError(f"stage {stage}: parameters differ from the inventory: {differing}")


def _state_bytes_of(
    candidate: Candidate, stage: int, records: Sequence[ParameterRecord]
) -> dict[str, int]:
    """Return the bytes that a rank keeps between steps, by category.

    The size is computed from the built parameters. As in a run, the parameters of each unit (the
    embedding, a layer or the head) are placed one after the other in a flat buffer with padding.
    """
    layout, optimizer = candidate.layout, candidate.config.optimizer
    whole = updates_whole_matrices(optimizer)
    units = group_records(records, layout.factors, keeps_whole=whole)
    layouts = {unit.name: unit.layout for unit in units}
    if optimizer.name == "adafactor":
        layouts = {
            unit.name: replace(unit.layout, factored=sum(map(count_sums, unit.records)))
            for unit in units
        }
    planned = layout.unit_layouts(stage)
    differing = {
        name
        for name in layouts.keys() | planned
        if _essence(layouts.get(name)) != _essence(planned.get(name))
    }
    if differing:
        raise DryRunError(f"stage {stage}: units differ from the plan: {sorted(differing)[:4]}")
    compute = layout.compute_bytes
    return rank_state_bytes(
        optimizer,
        unit_runs(layouts.values()),
        layout.factors,
        compute,
        data_rank=None,
        master=needs_master(compute),
    )


def _essence(layout: FlatLayout | None) -> object:
    """Return what does not depend on the order of the parameters of a unit."""
    return layout and replace(layout, starts=())


def _counted(records: Sequence[ParameterRecord]) -> int:
    """Return the model's parameters on this stage; a tied table is counted on one of its stages."""
    shapes = {
        placement.name: placement.global_shape
        for record in records
        if record.counted
        for placement in record.placements
    }
    return sum(prod(shape) for shape in shapes.values())
