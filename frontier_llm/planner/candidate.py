"""A layout that the planner judges, and its distinct stages."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.flat_layout import unit_layouts
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout

Shape = tuple[object, ...]
"""The properties in which stages of different kinds differ: layers by stack, and the model's ends
(embedding, head, norms)."""


@dataclass(frozen=True)
class StageKind:
    """Stages with like model chunks: they compute the same and hold the same states."""

    first: int
    """The first of these stages. It has most micro-batches in flight, so most activations."""
    count: int
    """Number of these stages."""
    chunks: tuple[ModelChunk, ...]
    """Model chunks of the first of them, ordered by virtual stage."""
    units: tuple[tuple[int, int], ...]
    """Pairs (elements of a unit's buffer on one tensor rank, number of such units), ascending,
    without the padding that the factors require."""

    @property
    def elements(self) -> int:
        """Elements of all units together."""
        return sum(size * count for size, count in self.units)


class StageKinds:
    """The kinds of a layout's stages, which do not depend on factors or on the micro-batch."""

    def __init__(self, layout: ResolvedLayout) -> None:
        self._layout = layout
        stages = range(layout.grid.pipeline)
        self._shapes = [_shape(layout.model, layout.chunks_of_stage(s)) for s in stages]

    @cached_property
    def kinds(self) -> tuple[StageKind, ...]:
        """The distinct kinds, in the order of the pipeline."""
        return tuple(
            StageKind(
                first=self._shapes.index(shape),
                count=count,
                chunks=self._layout.chunks_of_stage(self._shapes.index(shape)),
                units=self._units(self._shapes.index(shape)),
            )
            for shape, count in Counter(self._shapes).items()
        )

    def kind_of(self, stage: int) -> StageKind:
        """Return the kind of a stage."""
        first = self._shapes.index(self._shapes[stage])
        return next(kind for kind in self.kinds if kind.first == first)

    def _units(self, stage: int) -> tuple[tuple[int, int], ...]:
        layout = self._layout
        chunks, tensor = layout.chunks_of_stage(stage), layout.grid.tensor
        units = unit_layouts(layout.model, chunks, layout.sequence_length, tensor)
        return tuple(sorted(Counter(unit.size for unit in units.values()).items()))


@dataclass(frozen=True)
class Candidate:
    """A layout, with the configuration that it resolves: cluster, checkpoints, planner."""

    config: RunConfig
    layout: ResolvedLayout
    stages: StageKinds

    @classmethod
    def of(cls, config: RunConfig, ranks: int, ranks_per_node: int) -> "Candidate":
        """Resolve a configuration.

        Raises:
            ConfigError: it cannot be laid out over so many ranks.
        """
        layout = ResolvedLayout.resolve(config, ranks, ranks_per_node)
        return cls(config, layout, StageKinds(layout))

    def with_factors(self, factors: Factors) -> "Candidate":
        """Return the same layout with model states cut by other factors."""
        return Candidate(self.config, self.layout.with_factors(factors), self.stages)

    def with_cluster(self, cluster: ClusterConfig) -> "Candidate":
        """Return the same layout on another cluster."""
        return replace(self, config=self.config.model_copy(update={"cluster": cluster}))

    @property
    def grid(self) -> Grid:
        """All ranks."""
        return self.layout.grid

    @property
    def factors(self) -> Factors:
        """Over how many data ranks one copy of each model state is cut."""
        return self.layout.factors

    @property
    def description(self) -> str:
        """The layout in one line: sizes of the axes, micro-batch, factors, recomputation."""
        layout, factors = self.layout, self.factors
        return (
            f"TP {layout.grid.tensor} PP {layout.grid.pipeline}x{layout.virtual_stages} "
            f"DP {layout.grid.data} micro {layout.micro_batch} "
            f"factors {factors.params}/{factors.grads}/{factors.optimizer} {layout.recompute}"
        )


def _shape(model: ModelConfig, chunks: tuple[ModelChunk, ...]) -> Shape:
    return tuple(
        (
            tuple(
                (stack.name, len(stack.layers), stack.ends) for stack in chunk_stacks(model, chunk)
            ),
            chunk.has_embedding,
            chunk.has_head,
        )
        for chunk in chunks
    )


def ranks_to_plan(config: RunConfig) -> tuple[int, int]:
    """Return the number of ranks to plan for, and how many share a node.

    `planner.nodes` (its last value) counts first, then `launch.nodes`, then `launch.ranks`.
    """
    nodes = config.planner.nodes[-1] if config.planner.nodes else config.launch.nodes
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    if nodes is not None:
        return nodes * per_node, per_node
    return config.launch.ranks, min(per_node, config.launch.ranks)
