"""Enumerate what is tried: schedules, context ranks and sharding factors, and larger batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from frontier_llm.config.parallel import ScheduleName
from frontier_llm.config.planner import Sizes
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import divisors
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import ORDER, Factors, survives

LEAST_TOKENS = 256
"""Tokens of a sample per context rank at least if `parallel.context` is `auto`: a rank of a joined
sample has two ranges, and kernels of attention read 128 tokens at once."""


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
    config: RunConfig, stages: int, chunks: int, allowed: Sequence[ScheduleName] | None = None
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


def with_grown_batch(config: RunConfig, nodes: int, first: int) -> RunConfig:
    """Return a configuration whose global batch has grown in proportion from `first` nodes."""
    batch, rest = divmod(config.data.global_batch * nodes, first)
    if rest:
        raise ConfigError(
            "planner.nodes",
            nodes,
            f"numbers of nodes on which data.global_batch={config.data.global_batch} of {first} "
            "nodes can grow in proportion to a whole number of samples",
            f"choose multiples of {first} nodes, or a data.global_batch that {first} divides",
        )
    return config.changed("data", global_batch=batch)
