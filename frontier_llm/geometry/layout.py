"""A configuration laid out over ranks: the grid, and the factors that cut its model states."""

from collections import Counter

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.message_memory import feedback_bytes, message_bytes, rounds_refresh
from frontier_llm.geometry.partition import Factors, data_ranks_per_node
from frontier_llm.geometry.state_memory import gathered_elements, needs_master, state_bytes
from frontier_llm.geometry.units import keeps_head, stage_pieces, unit_layouts
from frontier_llm.units import GIB, format_bytes

STATES_SHARE = 0.7
"""Of a device's memory that model states may take; the rest is for activations and buffers."""
MIXED_BYTES = 2
"""Of a parameter in bf16 or fp16, which `auto` plans for."""


def make_grid(config: RunConfig, world_size: int, ranks_per_node: int) -> Grid:
    """Arrange the ranks; what tensor and pipeline leave is data parallelism."""
    parallel = config.parallel
    data = world_size // (parallel.tensor * parallel.pipeline)
    return Grid(parallel.tensor, data, parallel.pipeline, ranks_per_node)


def resolve_factors(config: RunConfig, grid: Grid) -> Factors:
    """Turn the configuration's factors into integers.

    Raises:
        ConfigError: they do not divide one another, or nothing fits the device's memory.
    """
    sharding = config.sharding
    if {sharding.params, sharding.grads, sharding.optimizer} == {"auto"}:
        return smallest_that_fits(config, grid)
    return Factors.resolve(sharding, grid.data, data_ranks_per_node(grid))


def smallest_that_fits(config: RunConfig, grid: Grid) -> Factors:
    """Choose the smallest factors whose states fit, those inside a node first.

    Parameters are cut last, since they are gathered in every micro-batch; optimizer states first,
    since they cost one refresh a step (the order of AMSP, arXiv:2311.00257).

    Raises:
        ConfigError: not even states cut over all replicas fit.
    """
    node = data_ranks_per_node(grid) or 1
    candidates = sorted(_chains(grid.data), key=lambda f: _preference(f, node))
    budget = STATES_SHARE * config.cluster.device.memory_gib * GIB
    for factors in candidates:
        if _most_bytes(config, grid, factors) <= budget:
            return factors
    least = min(_most_bytes(config, grid, factors) for factors in candidates)
    raise ConfigError(
        "sharding",
        f"auto: at least {format_bytes(least)} of model states on a rank",
        f"{STATES_SHARE:.0%} of the device's {config.cluster.device.memory_gib:g} GiB at most",
        "raise parallel.tensor or parallel.pipeline, or start more ranks",
    )


def predict_bytes(
    config: RunConfig,
    stage: int,
    factors: Factors,
    compute_bytes: int,
    grid: Grid | None = None,
) -> dict[str, int]:
    """Predict what a rank of a stage holds of model states, by category.

    `gathered` is a bound (state_memory.gathered_elements), and so is `messages`. All others are
    exact.

    Args:
        config: the run.
        stage: of the pipeline.
        factors: over how many ranks each state is cut.
        compute_bytes: of a parameter.
        grid: where nodes end, for the errors that are kept between them; absent = none are.
    """
    layouts = unit_layouts(config, stage, factors)
    formats, in_flight = StateFormats.at(config.collectives), config.sharding.units_in_flight
    master = needs_master(compute_bytes, rounds_refresh(formats, factors, compute_bytes))
    total: dict[str, int] = {}
    for layout in layouts.values():
        held = state_bytes(layout.size, factors, compute_bytes, master)
        total = {name: total.get(name, 0) + count for name, count in held.items()}
    units = Counter(one.size for one in layouts.values())
    keeps = keeps_head(config.model, stage_pieces(config, stage))
    gathered = gathered_elements(units, in_flight, keeps)
    total["gathered"] = gathered * compute_bytes if factors.params > 1 else 0
    if formats.encode(compute_bytes):
        total["feedback"] = sum(
            feedback_bytes(config.collectives, grid, factors, one.size) if grid else 0
            for one in layouts.values()
        )
        total["messages"] = message_bytes(
            formats, factors, layouts.values(), compute_bytes, in_flight
        )
    return total


def _chains(data: int) -> list[Factors]:
    divisors = [d for d in range(1, data + 1) if data % d == 0]
    return [
        Factors(p, g, o, data)
        for o in divisors
        for g in divisors
        for p in divisors
        if o % g == 0 and g % p == 0
    ]


def _preference(factors: Factors, node: int) -> tuple[int, ...]:
    sizes = (factors.params, factors.grads, factors.optimizer)
    return (*(size > node for size in sizes), *sizes)


def _most_bytes(config: RunConfig, grid: Grid, factors: Factors) -> int:
    """Return the states of the fullest stage's rank."""
    return max(
        sum(predict_bytes(config, stage, factors, MIXED_BYTES, grid).values())
        for stage in range(grid.pipeline)
    )
