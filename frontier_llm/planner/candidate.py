"""A layout to judge: a configuration on so many ranks, resolved to integers."""

from dataclasses import dataclass
from functools import cached_property

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.rules import check
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.layout import make_grid, resolve_factors
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.stacks import piece_stacks
from frontier_llm.geometry.stages import Piece, make_pieces, pieces_of_stage
from frontier_llm.geometry.units import stage_pieces, unit_elements

PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Shape = tuple[object, ...]
"""What tells the pieces of one stage from those of another: layers by stack, and the ends."""


@dataclass(frozen=True)
class StageKind:
    """Stages whose pieces are alike: they compute the same and hold the same states."""

    first: int
    """The first of them: it has most micro-batches in flight, so it holds most activations."""
    count: int
    """How many there are."""
    pieces: tuple[Piece, ...]
    """Of the first, by chunk."""
    units: tuple[tuple[int, int], ...]
    """(elements of a unit's buffer on one tensor rank, how many such units), without padding for
    the factors."""

    @property
    def elements(self) -> int:
        """Elements of all units together."""
        return sum(size * count for size, count in self.units)


class Model:
    """A configuration cut into stages, before its states are cut: shared by many candidates."""

    def __init__(self, config: RunConfig, like: "Model | None" = None) -> None:
        """Cut a model.

        Args:
            config: the run.
            like: of another configuration with the same axes and chunks: its stages are alike.
        """
        self.config = config
        self._shapes: list[Shape] = like._shapes if like else _shapes(config)
        self._like = like

    @cached_property
    def kinds(self) -> tuple[StageKind, ...]:
        """The distinct stages, in the order of the pipeline."""
        if self._like is not None:
            return self._like.kinds
        firsts = {shape: self._shapes.index(shape) for shape in self._shapes}
        return tuple(
            StageKind(
                first=first,
                count=self._shapes.count(shape),
                pieces=stage_pieces(self.config, first),
                units=_units(self.config, first),
            )
            for shape, first in sorted(firsts.items(), key=lambda item: item[1])
        )

    @cached_property
    def formats(self) -> StateFormats:
        """How states travel, in the first step."""
        return StateFormats.at(self.config.collectives)

    def kind_of(self, stage: int) -> StageKind:
        """Return the kind that a stage is of."""
        first = self._shapes.index(self._shapes[stage])
        return next(kind for kind in self.kinds if kind.first == first)


@dataclass(frozen=True)
class Candidate:
    """A layout: what the model is, how it is cut, over which ranks."""

    model: Model
    grid: Grid
    factors: Factors

    @classmethod
    def of(cls, config: RunConfig, ranks: int, ranks_per_node: int) -> "Candidate":
        """Lay out a configuration.

        Raises:
            ConfigError: it cannot be laid out over so many ranks.
        """
        check(config, ranks)
        grid = make_grid(config, ranks, ranks_per_node)
        return cls(Model(config), grid, resolve_factors(config, grid))

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self.model.config

    def with_config(self, config: RunConfig) -> "Candidate":
        """Return the same layout of a configuration with the same axes and chunks."""
        return Candidate(Model(config, like=self.model), self.grid, self.factors)

    @property
    def micro_batches(self) -> int:
        """What a replica computes in a step, one after the other."""
        data = self.config.data
        return data.global_batch // (self.grid.data * data.micro_batch)

    @property
    def precision(self) -> str:
        """Compute format; `auto` counts as bf16 (what GPUs choose)."""
        name = self.config.precision.name
        return "bf16" if name == "auto" else name

    @property
    def compute_bytes(self) -> int:
        """Bytes of a parameter and of an activation."""
        return PRECISION_BYTES[self.precision]

    @property
    def description(self) -> str:
        """The layout in one line: sizes of the axes, factors, what is computed again."""
        config, factors = self.config, self.factors
        return (
            f"TP {self.grid.tensor} PP {self.grid.pipeline}x{config.parallel.chunks} "
            f"DP {self.grid.data} micro {config.data.micro_batch} "
            f"factors {factors.params}/{factors.grads}/{factors.optimizer} {config.recompute}"
        )


def _shapes(config: RunConfig) -> list[Shape]:
    """Return the shape of every stage."""
    parallel = config.parallel
    pieces = make_pieces(
        config.model.layers, parallel.pipeline, parallel.chunks, parallel.layers_per_stage
    )
    stages = range(parallel.pipeline)
    return [_shape(config.model, pieces_of_stage(pieces, stage)) for stage in stages]


def _shape(model: ModelConfig, pieces: tuple[Piece, ...]) -> Shape:
    return tuple(
        (
            tuple((s.name, len(s.layers), s.ends) for s in piece_stacks(model, p)),
            p.has_embedding,
            p.has_head,
        )
        for p in pieces
    )


def _units(config: RunConfig, stage: int) -> tuple[tuple[int, int], ...]:
    sizes = list(unit_elements(config, stage, Factors(1, 1, 1, 1)).values())
    return tuple((size, sizes.count(size)) for size in sorted(set(sizes)))


def ranks_to_plan(config: RunConfig) -> tuple[int, int]:
    """Return the ranks that a configuration is planned for, and how many share a node.

    `planner.nodes` (the last of them), else `launch.nodes`, else `launch.ranks`.
    """
    nodes = config.planner.nodes[-1] if config.planner.nodes else config.launch.nodes
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    if nodes is not None:
        return nodes * per_node, per_node
    return config.launch.ranks, min(per_node, config.launch.ranks)
