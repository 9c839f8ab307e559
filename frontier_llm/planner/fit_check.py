"""Refuse a layout that does not fit in device memory, and name a change with which it fits.

A run calls `check_fits` before it allocates anything, unless `plan=off` is set.
"""

from collections.abc import Iterator
from typing import Any

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import divisors
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.memory import StageMemory, fullest
from frontier_llm.planner.space import legal_factors
from frontier_llm.planner.step_time import step_time
from frontier_llm.units import format_bytes

SHOWN = 3
"""Number of memory categories named in the message."""


def check_fits(candidate: Candidate) -> StageMemory:
    """Compare the memory of the fullest stage with that of the device.

    Returns:
        The memory of the fullest stage.

    Raises:
        ConfigError: the layout does not fit. The message names the largest categories of memory and
            the single change with which the layout fits at the smallest step time.
    """
    peak, budget = fullest(candidate), budget_bytes(candidate)
    if peak.total <= budget:
        return peak
    config = candidate.config
    device = config.cluster.device
    raise ConfigError(
        "plan",
        f"{format_bytes(peak.total)} on a rank of stage {peak.stage} of {candidate.grid.pipeline}: "
        + _largest_categories(peak),
        f"at most {format_bytes(budget)}: {config.planner.memory_share:.0%} of the "
        f"{device.memory_gib:g} GiB of {device.name} (cluster={config.cluster.name})",
        f"{_advice(candidate)}; plan=off starts the run without this check",
    )


def _largest_categories(peak: StageMemory) -> str:
    """Name the largest categories of memory, with their bytes."""
    ordered = sorted(peak.by_category.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered[:SHOWN])


def _advice(candidate: Candidate) -> str:
    """Name the single change with which the layout fits at the smallest step time."""
    fitting = [
        (_step_seconds(changed), order, overrides)
        for order, (overrides, changed) in enumerate(_changes(candidate))
        if fullest(changed).total <= budget_bytes(changed)
    ]
    if not fitting:
        return (
            "no single change fits: raise parallel.tensor and parallel.pipeline together, or start "
            "more ranks (frontier-llm plan searches all layouts)"
        )
    return f"set {min(fitting)[2]}"


def _step_seconds(candidate: Candidate) -> float:
    try:
        return step_time(candidate).seconds
    except (
        ConfigError
    ):  # the speed of the device is not known: equal seconds, the first change wins
        return 0.0


def _changes(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield overrides that change one setting, each with the layout that they give."""
    config, grid = candidate.config, candidate.grid
    for factors in legal_factors(config, candidate.grid, candidate.factors):
        overrides = (
            f"sharding.params={factors.params} sharding.grads={factors.grads} "
            f"sharding.optimizer={factors.optimizer}"
        )
        yield overrides, candidate.with_factors(factors)
    for overrides, changed in _changed_configs(config, grid.size):
        try:
            yield overrides, Candidate.of(changed, grid.size, grid.ranks_per_node)
        except ConfigError:  # this change gives no legal layout
            continue


def _changed_configs(config: RunConfig, ranks: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield more recomputation, smaller micro-batches, and more tensor or pipeline ranks."""
    for recompute in ("selective", "full"):
        if recompute != config.recompute:
            yield f"recompute={recompute}", config.model_copy(update={"recompute": recompute})
    for micro_batch in divisors(config.data.micro_batch)[:-1]:
        yield f"data.micro_batch={micro_batch}", _with(config, "data", micro_batch=micro_batch)
    for axis in ("tensor", "pipeline"):
        for size in divisors(ranks):
            if size > getattr(config.parallel, axis):
                values: dict[str, int | None] = {axis: size}
                if axis == "pipeline":  # a list of layers per stage fits only its own pipeline size
                    values["layers_per_stage"] = None
                yield f"parallel.{axis}={size}", _with(config, "parallel", **values)


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """Return a configuration with other values in one section."""
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})
