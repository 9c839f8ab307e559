"""Refuse a layout that does not fit its devices, and name a change with which it does."""

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
        ConfigError: it does not fit. The message names the largest categories and the change that
            fits and costs least time.
    """
    peak, budget = fullest(candidate), budget_bytes(candidate)
    if peak.total <= budget:
        return peak
    config = candidate.config
    device = config.cluster.device
    raise ConfigError(
        "plan",
        f"{format_bytes(peak.total)} on a rank of stage {peak.stage} of {candidate.grid.pipeline}: "
        + _terms(peak),
        f"at most {format_bytes(budget)}: {config.planner.memory_share:.0%} of the "
        f"{device.memory_gib:g} GiB of {device.name} (cluster={config.cluster.name})",
        f"{_advice(candidate)}; plan=off starts the run without this check",
    )


def _terms(peak: StageMemory) -> str:
    """Name the largest categories."""
    ordered = sorted(peak.by_category.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered[:SHOWN])


def _advice(candidate: Candidate) -> str:
    """Find the single change that fits and costs least time."""
    fitting = [
        (_seconds(changed), order, words)
        for order, (words, changed) in enumerate(_changes(candidate))
        if fullest(changed).total <= budget_bytes(changed)
    ]
    if not fitting:
        return (
            "no single change fits: raise parallel.tensor and parallel.pipeline together, or start "
            "more ranks (frontier-llm plan searches all layouts)"
        )
    return f"set {min(fitting)[2]}"


def _seconds(candidate: Candidate) -> float:
    try:
        return step_time(candidate).seconds
    except ConfigError:  # the speed of this device is not known: prefer the first change
        return 0.0


def _changes(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield every layout that differs in one respect, with the overrides that select it."""
    config, grid = candidate.config, candidate.grid
    for factors in legal_factors(config, grid.data):
        words = (
            f"sharding.params={factors.params} sharding.grads={factors.grads} "
            f"sharding.optimizer={factors.optimizer}"
        )
        yield words, candidate.with_factors(factors)
    for words, changed in _changed_configs(config, grid.size):
        try:
            yield words, Candidate.of(changed, grid.size, grid.ranks_per_node)
        except ConfigError:  # this change gives no legal layout
            continue


def _changed_configs(config: RunConfig, ranks: int) -> Iterator[tuple[str, RunConfig]]:
    for recompute in ("selective", "full"):
        if recompute != config.recompute:
            yield f"recompute={recompute}", config.model_copy(update={"recompute": recompute})
    for micro_batch in divisors(config.data.micro_batch)[:-1]:
        words = f"data.micro_batch={micro_batch}"
        yield words, _with(config, "data", micro_batch=micro_batch)
    for axis in ("tensor", "pipeline"):
        for size in divisors(ranks):
            if size > getattr(config.parallel, axis):
                split = {"layers_per_stage": None} if axis == "pipeline" else {}
                yield f"parallel.{axis}={size}", _with(config, "parallel", **{axis: size}, **split)


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})
