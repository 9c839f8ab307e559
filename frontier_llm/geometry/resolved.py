"""Resolve a configuration on a number of ranks to the integers that describe its layout.

Only `ResolvedLayout.resolve` does this. A run resolves its layout once and passes it on. The
planner resolves one layout per candidate.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from frontier_llm.config.collectives import CollectivesConfig, CommunicatorCount
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.optimizer import OptimizerConfig
from frontier_llm.config.rules import check
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.context_cut import CutWork, typical_work
from frontier_llm.geometry.flat_layout import (
    FlatLayout,
    UnitRuns,
    divided_layouts,
    padded_runs,
    unit_layouts,
    unit_runs,
)
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Grid, data_ranks_per_node, level_borders
from frontier_llm.geometry.lengths import SampleLengths, sample_lengths
from frontier_llm.geometry.model_chunks import ModelChunk, has_shared_table, make_model_chunks
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.pipeline_schedule import (
    FOLDED,
    Placement,
    Schedule,
    ScheduleName,
    make_schedule,
    pass_order,
)
from frontier_llm.geometry.state_memory import (
    COMPUTE_BYTES,
    check_whole_matrices,
    feedback_bytes,
    gathered_elements,
    message_bytes,
    needs_master,
    rank_state_bytes,
    refresh_is_lossy,
    saved_bytes,
    updates_whole_matrices,
)
from frontier_llm.geometry.wire import ActivationTraffic


@dataclass(frozen=True)
class ResolvedLayout:
    """All properties of a layout that follow from the configuration and the number of ranks."""

    grid: Grid
    model: ModelConfig
    sequence_length: int
    lengths: SampleLengths
    model_chunks: tuple[ModelChunk, ...]
    """Model chunks of the whole pipeline, in the order of the forward pass."""
    virtual_stages: int
    schedule_name: ScheduleName
    waiting_weights: int
    """How many weight gradients of a stage may wait."""
    sequence_parallel: bool
    """Whether norms and dropout are divided over the tensor ranks, along the sequence."""
    recompute: str
    """`none`, `selective` or `full`."""
    attention: str
    """`sdpa` or `flex`."""
    documents: str
    """`joined` or `separate`."""
    read_share: float
    """Share of the pairs of tokens of a sample that attention reads (`data.read_share`)."""
    precision: str
    """Compute format: `fp32`, `bf16` or `fp16`."""
    micro_batch: int
    """Samples per micro-batch."""
    micro_batches: int
    """Micro-batches per replica and step."""
    factors: Factors
    units_in_flight: int
    collectives: CollectivesConfig
    communicators: CommunicatorCount
    """How many communicators of a rank may work at the same time."""
    optimizer: OptimizerConfig
    formats: StateFormats
    """Formats of the collectives until step `collectives.until_step`, if that is set."""

    @classmethod
    def resolve(
        cls,
        config: RunConfig,
        ranks: int,
        ranks_per_node: int,
        *,
        precision: str | None = None,
        ignore_sharding: bool = False,
        check_rules: bool = True,
    ) -> "ResolvedLayout":
        """Resolve a configuration on a number of ranks.

        Args:
            ranks_per_node: number of neighbouring ranks that share a node.
            precision: compute format that the run has already chosen; None = that of the
                configuration, where `auto` stands for bf16.
            ignore_sharding: whether to leave model states unsharded.
            check_rules: false only in programs that do not train (config/rules.py).

        Raises:
            ConfigError: the configuration cannot run on these ranks, or its sharding factors do not
                divide one another or are still `auto` (planner/choice.py).
        """
        if check_rules:
            check(config, ranks)
        parallel, data = config.parallel, config.data
        grid = _grid(config, ranks, ranks_per_node)
        placement = Placement(parallel.pipeline, parallel.chunks, parallel.schedule in FOLDED)
        formats = StateFormats.at(config.collectives)
        compute_format = precision or config.precision.name
        # until the planner has chosen, `auto` stands for whole backward passes and even splits
        whole: ScheduleName = "interleaved" if parallel.chunks > 1 else "1f1b"
        waiting, layers = parallel.waiting_weights, parallel.layers_per_stage
        return cls(
            grid=grid,
            model=config.model,
            sequence_length=data.sequence_length,
            lengths=sample_lengths(config.model, data),
            model_chunks=make_model_chunks(
                config.model.layers, placement, None if layers == "auto" else layers
            ),
            virtual_stages=parallel.chunks,
            schedule_name=whole if parallel.schedule == "auto" else parallel.schedule,
            waiting_weights=0 if waiting == "auto" else waiting,
            sequence_parallel=parallel.sequence,
            recompute=config.recompute,
            attention=config.attention,
            documents=data.documents,
            read_share=data.pairs_read,
            precision="bf16" if compute_format == "auto" else compute_format,
            micro_batch=data.micro_batch,
            micro_batches=data.global_batch // (max(1, grid.replicas) * data.micro_batch),
            factors=_factors(config, grid, formats, ignore_sharding=ignore_sharding),
            units_in_flight=config.sharding.units_in_flight,
            collectives=config.collectives,
            communicators=config.collectives.communicators or config.cluster.device.communicators,
            optimizer=config.optimizer,
            formats=formats,
        )

    def with_factors(self, factors: Factors) -> "ResolvedLayout":
        """Return the same layout with other sharding factors."""
        return replace(self, factors=factors)

    @property
    def compute_bytes(self) -> int:
        """Bytes per parameter and per activation."""
        return COMPUTE_BYTES[self.precision]

    @property
    def nodes_per_copy(self) -> int:
        """Number of nodes over which one copy of the optimizer states is divided."""
        data_ranks = max(self.factors.optimizer, data_ranks_per_node(self.grid) or 1)
        ranks = self.grid.tensor * self.grid.pipeline * data_ranks
        return max(1, ranks // self.grid.ranks_per_node)

    @property
    def placement(self) -> Placement:
        """Placement of the model chunks on the stages."""
        is_folded = self.schedule_name in FOLDED
        return Placement(self.grid.pipeline, self.virtual_stages, is_folded)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from the rest of the backward pass."""
        return self.waiting_weights > 0 or self.schedule_name not in ("1f1b", "interleaved")

    @property
    def schedule(self) -> Schedule:
        """The actions of all stages in one step."""
        return make_schedule(
            self.schedule_name,
            self.grid.pipeline,
            self.virtual_stages,
            self.micro_batches,
            self.waiting_weights,
            self.recompute == "full",
        )

    @property
    def pass_order(self) -> Schedule:
        """The passes of all stages in one step before backward passes are split."""
        return pass_order(
            self.schedule_name, self.grid.pipeline, self.virtual_stages, self.micro_batches
        )

    @property
    def head_stage(self) -> int:
        """The stage with the last model chunk, which computes the loss."""
        return self.model_chunks[-1].stage

    def chunks_of_stage(self, stage: int) -> tuple[ModelChunk, ...]:
        """Return the model chunks of a stage, ordered by virtual stage."""
        return tuple(chunk for chunk in self.model_chunks if chunk.stage == stage)

    def unpadded_layouts(self, chunks: Sequence[ModelChunk]) -> dict[str, FlatLayout]:
        """Return the layout of each unit of a stage with these chunks, which no factor changes."""
        return unit_layouts(
            self.model,
            chunks,
            self.sequence_length,
            self.grid.tensor,
            keeps_whole=updates_whole_matrices(self.optimizer),
            factors_moments=self.optimizer.name == "adafactor",
        )

    def unit_layouts(self, stage: int) -> dict[str, FlatLayout]:
        """Return the layout of each unit's flat buffer on a tensor rank of a stage."""
        units = self.unpadded_layouts(self.chunks_of_stage(stage))
        padded = [layout.padded(self.factors.multiple()) for layout in units.values()]
        return dict(zip(units, divided_layouts(padded, self.factors.optimizer), strict=True))

    def unit_sizes(self, stage: int) -> dict[str, int]:
        """Return the elements of each unit's buffer on one tensor rank, padding included."""
        return {unit: layout.size for unit, layout in self.unit_layouts(stage).items()}

    @property
    def activation_traffic(self) -> ActivationTraffic:
        """Counts the bytes of activations that ranks send for one micro-batch."""
        lengths = replace(self.lengths, decoder=self.lengths.decoder // self.grid.context)
        return ActivationTraffic(
            self.model,
            lengths,
            self.micro_batch,
            self.grid.tensor,
            self.sequence_parallel,
            self.recompute,
            self.compute_bytes,
        )

    @property
    def context_work(self) -> CutWork:
        """What context ranks compute and send in a typical sample."""
        return typical_work(self.sequence_length, self.read_share, self.grid.context)

    @property
    def exchanges_heads(self) -> bool:
        """Whether context ranks exchange heads in a typical sample, and not keys and values."""
        traffic = self.activation_traffic
        return traffic.head_exchange(self.grid.context).pays(
            self.context_work.rows, traffic.lengths.decoder, recomputes=self.recompute == "full"
        )

    @property
    def boundary_bytes(self) -> float:
        """Bytes of the largest message between stages for one micro-batch: the last one."""
        _, *later = self.model_chunks
        return self.activation_traffic.boundary_bytes(later[-1]) if later else 0.0

    def state_bytes(self, stage: int, data_rank: int | None = None) -> dict[str, int]:
        """Return the bytes of model states on a rank of a stage, by category.

        The categories `gathered` (gathered parameters) and `messages` (buffers of encoded messages)
        are upper bounds; the others are exact. `messages` and `feedback` (rounding errors that are
        kept) are present only if messages are encoded. Without a data rank, the one with the most
        bytes counts: ranks differ if the optimizer updates whole matrices (`partition.Cut`).
        """
        chunks = self.chunks_of_stage(stage)
        units = unit_runs(self.unpadded_layouts(chunks).values())
        return self.units_bytes(units, chunks, data_rank)

    def units_bytes(
        self, unpadded: UnitRuns, chunks: Sequence[ModelChunk], data_rank: int | None = None
    ) -> dict[str, int]:
        """Return what `state_bytes` does, for a stage whose units and chunks are known."""
        factors, compute_bytes = self.factors, self.compute_bytes
        units = padded_runs(unpadded, factors.multiple(), factors.optimizer)
        is_lossy = refresh_is_lossy(self.formats, factors, compute_bytes)
        master = needs_master(compute_bytes, is_lossy)
        total = rank_state_bytes(
            self.optimizer, units, factors, compute_bytes, data_rank, master=master
        )
        sizes = Counter[int]()
        for layout, count in units:
            sizes[layout.size] += count
        shared = has_shared_table(self.model, chunks)
        gathered = gathered_elements(sizes, self.units_in_flight, shared)
        total["gathered"] = gathered * compute_bytes if factors.params > 1 else 0
        if self.formats.any_encoded(compute_bytes):
            total["feedback"] = sum(
                count * feedback_bytes(self.collectives, self.grid, factors, layout.size)
                for layout, count in units
            )
            written = sizes.total() if self.splits_backward else 1 + shared
            in_flight = self.units_in_flight
            total["messages"] = message_bytes(
                self.formats, factors, units, compute_bytes, in_flight, written
            )
        return total

    def saved_bytes(self, stage: int, data_rank: int | None = None) -> int:
        """Return the bytes that a rank of a stage saves to a checkpoint on the disk of its node.

        The arguments are those of `state_bytes`.
        """
        layouts = unit_runs(self.unit_layouts(stage).values())
        return saved_bytes(self.optimizer, layouts, self.factors, data_rank)


def _grid(config: RunConfig, ranks: int, ranks_per_node: int) -> Grid:
    parallel, per_package = config.parallel, config.cluster.ranks_per_package(ranks_per_node)
    data = ranks // (parallel.tensor * parallel.pipeline)
    axes = parallel.tensor, data, parallel.pipeline
    return Grid(*axes, ranks_per_node, per_package, parallel.context_ranks)


def _factors(
    config: RunConfig, grid: Grid, formats: StateFormats, *, ignore_sharding: bool
) -> Factors:
    """Return the sharding factors, divided at packages and nodes if ranks exchange messages."""
    whole = Factors(1, 1, 1, grid.data)
    factors = whole if ignore_sharding else Factors.resolve(config.sharding, grid)
    by_pairs = config.cluster.device.kind == "cpu" and config.collectives.pairwise
    check_whole_matrices(config, factors, formats)
    borders = level_borders(grid) if formats.exchanges or by_pairs else ()
    return replace(factors, divides_sums=formats.encodes_sums, borders=borders)
