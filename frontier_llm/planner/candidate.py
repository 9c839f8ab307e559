"""A layout whose memory and speed the planner predicts, with its distinct pipeline stages.

Most stages of a large pipeline have equal layers, so the planner evaluates each kind once.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal, TypeVar

from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.communicators import TiedStages, communicators, tied_stages
from frontier_llm.geometry.flat_layout import FlatLayout, UnitRuns, unit_runs
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks, chunk_tables
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout

T = TypeVar("T")
TABLES = ("encoder_embedding", "embedding", "positions")
"""Units that are tables with a row per token or position."""
Shape = tuple[object, ...]
"""The content of a stage: the number of its layers in each stack (encoder or decoder), and whether
it has the embedding, the head and a final norm. Stages with equal content are of the same kind."""


@dataclass(frozen=True)
class UnitRun:
    """Consecutive units of equal kind and size."""

    what: Literal["table", "layer", "norm", "head"]
    elements: int
    """Elements of each unit on one tensor rank."""
    count: int


@dataclass(frozen=True)
class StageKind:
    """Pipeline stages with equal model chunks, which compute and store the same amounts."""

    first: int
    """Index of the first of these stages. It has the most micro-batches in flight and therefore the
    most activations of its kind."""
    count: int
    chunks: tuple[ModelChunk, ...]
    """Model chunks (groups of consecutive layers) of the first stage, ordered by virtual stage."""
    units: tuple[tuple[int, int], ...]
    """Sizes of the sharding units (parameters that are gathered together: one layer, the embedding
    or the head): pairs of the elements of a unit on one tensor rank and the number of such units,
    ascending. The padding that the sharding factors require is not included."""
    chunk_units: tuple[tuple[UnitRun, ...], ...]
    """For each model chunk, its units in the order of the forward pass, without padding."""
    largest_table: int
    """Elements of the largest table (embedding or positions) on one tensor rank; 0 without one."""
    layouts: UnitRuns
    """The flat buffers of all units in the order of the forward pass, without padding."""

    @property
    def elements(self) -> int:
        """Parameters of a stage on one tensor rank, without padding."""
        return sum(size * count for size, count in self.units)


class Memo:
    """Results that many layouts of a search share."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` returned for this key, by which alone the layouts differ."""
        if key not in self._known:
            self._known[key] = compute()
        found: T = self._known[key]
        return found


class StageKinds(Memo):
    """The kinds of stages in a layout, which do not depend on factors or on the micro-batch."""

    def __init__(self, layout: ResolvedLayout) -> None:
        super().__init__()
        self._layout = layout
        stages = range(layout.grid.pipeline)
        self._shapes = [_shape(layout.model, layout.chunks_of_stage(stage)) for stage in stages]

    @cached_property
    def kinds(self) -> tuple[StageKind, ...]:
        """The distinct kinds, ordered by their first stage."""
        found = []
        for shape, count in Counter(self._shapes).items():
            first = self._shapes.index(shape)
            chunks = self._layout.chunks_of_stage(first)
            of_chunks = [
                self.once(content, partial(self._layout.unpadded_layouts, [chunk]))
                for content, chunk in zip(shape, chunks, strict=True)
            ]
            tables, layouts = dict[str, int](), list[FlatLayout]()
            for name, unit in (unit for of_chunk in of_chunks for unit in of_chunk.items()):
                # two chunks of a stage may have the same table, as embedding and as head
                if name not in tables:
                    layouts.append(unit)
                tables |= {name: unit.used} if name in TABLES else {}
            units = tuple(sorted(Counter(unit.used for unit in layouts).items()))
            chunk_units = tuple(map(_runs, of_chunks))
            largest_table = max(tables.values(), default=0)
            runs = unit_runs(layouts)
            found.append(StageKind(first, count, chunks, units, chunk_units, largest_table, runs))
        return tuple(found)

    @cached_property
    def tied(self) -> TiedStages:
        """Sets of stages that hold copies of a parameter."""
        return tied_stages(self._layout)

    def communicator_bytes(self, layout: ResolvedLayout, stage: int, channels: int) -> int:
        """Return the bytes of the buffers of all communicators of a stage's first rank."""

        def count() -> int:
            created = communicators(layout, stage, self.tied)
            return sum(communicator.buffer_bytes(channels) for communicator in created)

        return self.once(("communicators", layout.factors, stage, channels), count)

    @cached_property
    def by_stage(self) -> list[StageKind]:
        """The kind of each stage."""
        return self.of_stages(self.kinds)

    def of_stages(self, values: Sequence[T]) -> list[T]:
        """Return a value for each stage from the values for each kind of stage."""
        by_first = {kind.first: value for kind, value in zip(self.kinds, values, strict=True)}
        return [by_first[self._shapes.index(shape)] for shape in self._shapes]


@dataclass(frozen=True)
class Candidate:
    """A layout that may be predicted, with the configuration from which it was resolved."""

    config: RunConfig
    """Provides what the layout lacks: cluster, checkpoint and planner settings."""
    layout: ResolvedLayout
    stages: StageKinds

    @classmethod
    def of(cls, config: RunConfig, ranks: int, ranks_per_node: int) -> "Candidate":
        """Resolve a configuration on a number of ranks, as `ResolvedLayout.resolve` does."""
        layout = ResolvedLayout.resolve(config, ranks, ranks_per_node)
        return cls(config, layout, StageKinds(layout))

    def with_factors(self, factors: Factors) -> "Candidate":
        """Return the same layout with other sharding factors."""
        return Candidate(self.config, self.layout.with_factors(factors), self.stages)

    def with_cluster(self, cluster: ClusterConfig) -> "Candidate":
        """Return the same layout on another cluster."""
        return replace(self, config=self.config.model_copy(update={"cluster": cluster}))

    @property
    def grid(self) -> Grid:
        """All ranks of the layout."""
        return self.layout.grid

    @property
    def factors(self) -> Factors:
        """The sharding factors."""
        return self.layout.factors

    @property
    def description(self) -> str:
        """The layout in one line: axes, schedule, micro-batch, factors, recomputation."""
        layout, grid = self.layout, self.grid
        schedule = f"{self.schedule} " if grid.pipeline > 1 else ""
        context = f"CP {grid.context} " if grid.context > 1 else ""
        return (
            f"TP {grid.tensor} {context}PP {grid.pipeline}x{layout.virtual_stages} {schedule}"
            f"DP {grid.data} micro {layout.micro_batch} "
            f"factors {self.factors.in_words} {layout.recompute}"
        )

    @property
    def schedule(self) -> str:
        """Name of the schedule; if weight gradients wait, with their largest number."""
        waiting = self.layout.waiting_weights
        return self.layout.schedule_name + (f"+{waiting}" if waiting else "")


def _runs(units: Mapping[str, FlatLayout]) -> tuple[UnitRun, ...]:
    """Return the units of a model chunk, given by name in the order of the forward pass."""
    sizes = groupby((_what(name), unit.used) for name, unit in units.items())
    return tuple(UnitRun(what, size, len(list(equal))) for (what, size), equal in sizes)


def _what(unit: str) -> Literal["table", "layer", "norm", "head"]:
    if unit in TABLES:
        return "table"
    if unit == "head":
        return "head"
    return "layer" if unit.startswith("layers.") else "norm"


def _shape(model: ModelConfig, chunks: tuple[ModelChunk, ...]) -> Shape:
    return tuple(
        (
            tuple(
                (stack.name, len(stack.layers), stack.ends) for stack in chunk_stacks(model, chunk)
            ),
            chunk_tables(model, chunk),
            chunk.has_head,
        )
        for chunk in chunks
    )


def ranks_to_plan(config: RunConfig) -> tuple[int, int]:
    """Return the number of ranks to plan for, and the number of ranks per node.

    The number of ranks comes from the last value of `planner.nodes`, else from `launch.nodes`, else
    from `launch.ranks`.
    """
    nodes = config.planner.nodes[-1] if config.planner.nodes else config.launch.nodes
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    if nodes is not None:
        return nodes * per_node, per_node
    return config.launch.ranks, min(per_node, config.launch.ranks)
