"""Enumerate the space of a search: cuts of the model, and sharding factors of its states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from frontier_llm.config.parallel import ScheduleName
from frontier_llm.config.planner import Recompute, Sizes
from frontier_llm.config.run import RunConfig
from frontier_llm.geometry.elastic import divisors
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import ORDER, Factors, survives

DEFAULT_CHUNKS = (1, 2, 4, 8)
"""Model chunks per stage that are tried if `planner.chunks` is not set."""
LEAST_TOKENS = 256
"""Tokens of a sample per context rank at least if `parallel.context` is `auto`: a rank of a joined
sample has two ranges, and kernels of attention read 128 tokens at once."""
LARGEST_MICRO_BATCH = 64
"""Largest micro-batch in samples that is tried if `planner.micro_batch` is not set."""


WAITING: dict[ScheduleName, tuple[int, ...]] = {
    "1f1b": (0, 1, 4),
    "interleaved": (0, 1, 4),
    "zb_v": (2, 16, 0),
}
"""Values of parallel.waiting_weights that are tried for a schedule; for other schedules 0, their
own rule. With larger values, more memory is needed and the bubble is smaller."""
SCHEDULES: dict[int, tuple[ScheduleName, ...]] = {
    1: ("1f1b", "zb_h1"),
    2: ("interleaved", "zb_v", "v_half"),
}
"""Schedules that are tried for a number of model chunks; for larger numbers `interleaved`."""


_SHARDS: dict[str, Callable[[int, int, int, int], bool]] = {
    "any": lambda p, g, o, data: True,
    "none": lambda p, g, o, data: o == 1,
    "optimizer": lambda p, g, o, data: g == 1,
    "stages": lambda p, g, o, data: p == o or (o == data and {p, g} <= {1, o}),
    "fsdp": lambda p, g, o, data: g == o and p in (1, o),
}
"""Which sharding factors a program can use, by `planner.engine.shards`."""


class Order(NamedTuple):
    """The order of the actions of a pipeline."""

    schedule: ScheduleName
    waiting_weights: int

    def __str__(self) -> str:
        return self.schedule + (f"+{self.waiting_weights}" if self.waiting_weights else "")


def orders(
    config: RunConfig,
    stages: int,
    chunks: int,
    allowed: Sequence[ScheduleName] | None = None,
) -> Iterator[Order]:
    """Yield the pipeline schedules to try, those with whole backward passes first.

    `parallel.schedule` and `parallel.waiting_weights` are not read. A schedule that splits backward
    passes needs fused gradients and layers that are not compiled (config/rules.py).
    """
    can_split = (
        stages > 1
        and config.planner.engine.splits_backward
        and config.sharding.fused_gradients
        and config.kernels != "compiled"
    )
    names = SCHEDULES.get(chunks, ("interleaved",))
    for name in names:
        if allowed is None or name in allowed:
            for waiting in WAITING.get(name, (0,)):
                if can_split or (waiting == 0 and name in ("1f1b", "interleaved")):
                    yield Order(name, waiting)


@dataclass(frozen=True)
class Cut:
    """How a model is divided over ranks and computed: a layout without its sharding factors."""

    tensor: int
    pipeline: int
    context: int
    """Data ranks that divide the tokens of a sample."""
    chunks: int
    """Model chunks (virtual stages) per stage."""
    order: Order
    micro_batch: int
    """Samples per micro-batch."""
    recompute: str
    """`none`, `selective` or `full`."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each model chunk; None = an even split."""

    def __str__(self) -> str:
        layers = f" layers {list(self.layers_per_stage)}" if self.layers_per_stage else ""
        context = f"CP {self.context} " if self.context > 1 else ""
        return (
            f"TP {self.tensor} {context}PP {self.pipeline}x{self.chunks} {self.order} "
            f"micro {self.micro_batch} {self.recompute}{layers}"
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return a configuration with this cut.

        Sequence parallelism is used if the tensor ranks divide the sequence length, or each of the
        two ranges of a context rank. It sends no more bytes than tensor parallelism alone, and
        saves time and memory.
        """
        multiple = self.tensor * (2 * self.context if self.context > 1 else 1)
        sequence_parallel = self.tensor > 1 and config.data.sequence_length % multiple == 0
        config = config.changed(
            "parallel",
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            chunks=self.chunks,
            schedule=self.order.schedule,
            waiting_weights=self.order.waiting_weights,
            sequence=sequence_parallel,
            layers_per_stage=self.layers_per_stage,
        )
        config = config.changed("data", micro_batch=self.micro_batch)
        return config.model_copy(update={"recompute": self.recompute})


def cuts(config: RunConfig, ranks: int, ranks_per_node: int) -> Iterator[Cut]:
    """Yield every cut with an even split, including cuts that cannot be resolved.

    Tensor ranks stay inside a node. Without a pipeline there is one model chunk.
    """
    planner = config.planner
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    if planner.engine.fused_attention:
        # it keeps no scores: `selective` would take longer and save no memory
        modes = ("none", "full")
    largest = min(LARGEST_MICRO_BATCH, config.data.global_batch)
    powers = [2**power for power in range(largest.bit_length())]
    micro_batches = _allowed(planner.micro_batch, powers)
    for tensor in _allowed(planner.tensor, divisors(min(ranks, ranks_per_node))):
        if ranks % tensor:
            continue
        stage_counts = [p for p in divisors(ranks // tensor) if p <= config.model.layers]
        for pipeline in _allowed(planner.pipeline, stage_counts):
            contexts = _allowed(planner.context, context_sizes(config, ranks // tensor // pipeline))
            chunk_counts = _allowed(planner.chunks, DEFAULT_CHUNKS if pipeline > 1 else (1,))
            for context, chunks in product(contexts, chunk_counts):
                found = orders(config, pipeline, chunks, planner.schedule)
                for values in product(found, micro_batches, planner.recompute or modes):
                    yield Cut(tensor, pipeline, context, chunks, *values)


def context_sizes(config: RunConfig, data_ranks: int) -> list[int]:
    """Return the values for which `parallel.context` stands, ascending.

    For `auto` these are the divisors of the data ranks that leave each rank `LEAST_TOKENS`.
    """
    if config.parallel.context != "auto":
        return [config.parallel.context]
    most = max(1, config.data.sequence_length // LEAST_TOKENS)
    return [size for size in divisors(data_ranks) if size <= most]


def legal_factors(config: RunConfig, grid: Grid, base: Factors) -> tuple[Factors, ...]:
    """Return every legal set of sharding factors that `planner` allows, in ascending order.

    `base` are any factors for the same ranks and message formats.
    """
    planner = config.planner
    sizes = planner.params, planner.grads, planner.optimizer
    legal = _legal_factors(base, planner.engine.shards, *sizes)
    wanted = ORDER.index(planner.survives)
    if not wanted or config.recovery.partner_copies:  # these copies survive with any factors
        return legal
    return tuple(found for found in legal if ORDER.index(survives(grid, found)) >= wanted)


@lru_cache
def _legal_factors(base: Factors, shards: str, *restrictions: Sizes | None) -> tuple[Factors, ...]:
    data = base.data
    allowed = [[d for d in divisors(data) if sizes is None or d in sizes] for sizes in restrictions]
    return tuple(
        replace(base, params=params, grads=grads, optimizer=optimizer)
        for params, grads, optimizer in product(*allowed)
        if grads % params == 0
        and optimizer % grads == 0
        and _SHARDS[shards](params, grads, optimizer, data)
    )


def _allowed(configured: Sequence[int] | None, default: Sequence[int]) -> Sequence[int]:
    return default if configured is None else configured
