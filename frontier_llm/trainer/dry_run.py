"""Builds every stage of a run without memory, and compares it with the plan.

Each stage is built from the real modules on the meta device, as its first rank at the full world
size under torch's fake process group. This needs no memory and no other process. The states are
laid out in flat buffers as in a run. Names, shapes and bytes must be what planner/ predicts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from frontier_llm.device.kernels import TORCH
from frontier_llm.errors import FrontierError
from frontier_llm.geometry.flat_layout import flat_layout
from frontier_llm.geometry.grid import Coordinates
from frontier_llm.geometry.inventory import chunk_parameters, count_parameters
from frontier_llm.geometry.state_memory import needs_master, state_bytes
from frontier_llm.model.build import build_model
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import destroy_groups, make_groups
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.memory import STATES, stage_memory
from frontier_llm.protocols import ParameterRecord

META = torch.device("meta")


class DryRunError(FrontierError):
    """A built stage differs from the plan: an error of this program, not of the configuration."""


@dataclass(frozen=True)
class BuiltStage:
    """A stage as it was built."""

    stage: int
    parameters: int
    """Elements of the stage's parameters on one tensor rank."""
    counted: int
    """Elements of the model's parameters that this stage counts; all stages add up to the model."""
    state_bytes: dict[str, int]
    """Bytes that a rank keeps between steps, by category."""
    peak_bytes: int
    """Predicted peak memory of a rank."""


def dry_run(
    candidate: Candidate, stages: Sequence[int], progress: Callable[[float], None]
) -> list[BuiltStage]:
    """Build stages one after the other, and compare each with the plan.

    The process must have no process group, and has none afterwards.

    Args:
        candidate: the layout, at the full world size.
        stages: numbers of the stages to build.
        progress: called with the share that is done, 0 to 1.

    Raises:
        DryRunError: a parameter, a shape or a byte differs from the prediction.
    """
    megatron_cpu.install()
    built = []
    for done, stage in enumerate(stages):
        progress(done / len(stages))
        with _ranks(candidate, stage):
            built.append(_build(candidate, stage))
    return built


@contextmanager
def _ranks(candidate: Candidate, stage: int) -> Iterator[None]:
    """Make this process the first rank of a stage, in a world of fake ranks."""
    grid = candidate.grid
    rank = grid.rank(Coordinates(tensor=0, data=0, pipeline=stage))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
    try:
        yield
    finally:
        destroy_groups()


def check_count(candidate: Candidate, built: Sequence[BuiltStage]) -> None:
    """Check that the parameters of all stages add up to those of the whole model.

    Raises:
        DryRunError: they do not.
    """
    config = candidate.config
    expected = count_parameters(config.model, config.data.sequence_length)
    counted = sum(stage.counted for stage in built)
    if counted != expected:
        raise DryRunError(f"all stages count {counted} parameters, the model has {expected}")


def _build(candidate: Candidate, stage: int) -> BuiltStage:
    config = candidate.config
    groups = make_groups(config.parallel, candidate.grid.ranks_per_node, config.trainer.seed)
    model = build_model(candidate.layout, groups, META, TORCH, config.trainer.seed)
    _compare_names(candidate, stage, model.records)
    kept = _allocated(candidate, stage, model.records)
    planned = stage_memory(candidate, stage)
    for name in STATES:
        if kept[name] != planned.by_category[name]:
            raise DryRunError(
                f"stage {stage} would allocate {kept[name]} bytes of {name}, "
                f"{planned.by_category[name]} were planned"
            )
    return BuiltStage(
        stage=stage,
        parameters=sum(record.parameter.numel() for record in model.records),
        counted=_counted(model.records),
        state_bytes=kept,
        peak_bytes=planned.total,
    )


def _compare_names(candidate: Candidate, stage: int, records: Sequence[ParameterRecord]) -> None:
    """Check names and global shapes against the inventory."""
    layout = candidate.layout
    expected = Counter(
        (shape.name, shape.shape)
        for chunk in layout.chunks_of_stage(stage)
        for shape in chunk_parameters(layout.model, chunk, layout.sequence_length)
    )
    found = Counter(
        (placement.name, tuple(placement.global_shape))
        for record in records
        for placement in record.placements
    )
    if found != expected:
        differing = sorted((found - expected) + (expected - found))[:4]
        raise DryRunError(f"stage {stage}: parameters differ from the inventory: {differing}")


def _allocated(
    candidate: Candidate, stage: int, records: Sequence[ParameterRecord]
) -> dict[str, int]:
    """Lay the parameters out in flat buffers as sharding/ does; return the bytes a rank keeps."""
    units: defaultdict[str, list[ParameterRecord]] = defaultdict(list)
    for record in records:
        units[record.unit].append(record)
    sizes = {}
    for name, members in units.items():
        numbers = [record.parameter.numel() for record in members]
        decayed = [record.decayed for record in members]
        sizes[name] = flat_layout(numbers, decayed, candidate.factors.multiple()).size
    planned = candidate.layout.unit_sizes(stage)
    if sizes != planned:
        differing = {
            name for name in sizes.keys() | planned if sizes.get(name) != planned.get(name)
        }
        raise DryRunError(f"stage {stage}: units differ from the plan: {sorted(differing)[:4]}")
    total = dict.fromkeys(STATES, 0)
    compute = candidate.layout.compute_bytes
    for size in sizes.values():
        held = state_bytes(size, candidate.factors, compute, needs_master(compute))
        for name in STATES:
            total[name] += held[name]
    return total


def _counted(records: Sequence[ParameterRecord]) -> int:
    """Count this stage's elements of the whole model; a tied table counts on one stage only."""
    shapes = {
        placement.name: placement.global_shape
        for record in records
        if record.counted
        for placement in record.placements
    }
    return sum(prod(shape) for shape in shapes.values())
