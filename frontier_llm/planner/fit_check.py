"""Refuse a layout that does not fit in device memory, and name changes with which it fits.

A run calls `check_fits` before it allocates anything, unless `plan=off` is set.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import divisors
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.choice import FREE_SHARE
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.memory import StageMemory, fullest
from frontier_llm.planner.space import legal_factors
from frontier_llm.planner.step_time import step_time
from frontier_llm.units import format_bytes

SHOWN = 3
"""Number of memory categories named in the message."""
NAMED, LAYOUTS_NAMED = 4, 2
"""Largest number of changes named in the message, and of those that change the layout alone."""
SHARDED = "sharding.params=auto sharding.grads=auto sharding.optimizer=auto"
LENGTH = "data.sequence_length"
MORE_RANKS = (2, 4, 8, 16)
"""Factors by which the ranks are raised if no change of the layout fits."""
Changes = Iterable[tuple[str, RunConfig]]
"""Overrides, each with the configuration that it gives."""
Composed = Callable[[str, int], RunConfig]
"""Composes the configuration of a run again, with more overrides and for a number of ranks. `auto`
is replaced by choices, and a ConfigError is raised if none fits."""


def check_fits(
    candidate: Candidate, others: Iterable[Changes] = (), composed: Composed | None = None
) -> StageMemory:
    """Return the memory of the fullest stage, or refuse a layout that does not fit in the device.

    Args:
        candidate: the layout.
        others: changes of other things than the layout, such as the optimizer. Of each group, the
            first change that fits is named.
        composed: gives the configuration after a change. It may differ in more than the change,
            because defaults depend on other keys. None = nothing else differs.

    Raises:
        ConfigError: the message names the largest categories of memory, and changes with which the
            run fits: first those with the smallest step time.
    """
    peak, budget = fullest(candidate), budget_bytes(candidate)
    if peak.total <= budget:
        return peak
    config = candidate.config
    device = config.cluster.device
    advice = _advice(candidate, others, composed)
    largest = sorted(peak.by_category.items(), key=lambda item: -item[1])[:SHOWN]
    key, got = "plan", f"{format_bytes(peak.total)} on a rank of stage {peak.stage} of "
    if advice.startswith(f"set {LENGTH}="):  # no layout fits samples of this length
        key, got = LENGTH, f"{config.data.sequence_length}: {got}"
    raise ConfigError(
        key,
        f"{got}{candidate.grid.pipeline}: "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in largest),
        f"at most {format_bytes(budget)}: {config.planner.memory_share:.0%} of the "
        f"{device.memory_gib:g} GiB of {device.name} (cluster={config.cluster.name})",
        f"{advice}; plan=off starts the run without this check",
    )


def _advice(candidate: Candidate, others: Iterable[Changes], composed: Composed | None) -> str:
    """Name changes with which the run fits, with their memory.

    A change that leaves less than FREE_SHARE of the memory free is named only if no other fits.
    """
    roomy = int((1 - FREE_SHARE) * budget_bytes(candidate))
    layouts = _layout_changes(candidate, composed)
    named = [change for change in layouts if change[1] <= roomy][:LAYOUTS_NAMED]
    named += islice(_first_fitting(candidate, others, roomy, composed), NAMED - len(named))
    words = [f"{overrides} ({format_bytes(size)})" for overrides, size in named or layouts[:1]]
    more_ranks = _more_ranks(candidate, composed) if composed and not layouts else None
    more = f"start {more_ranks} ranks on as many devices with {SHARDED}" if more_ranks else ""
    if not words:
        return (
            "no single change fits: raise parallel.tensor and parallel.pipeline together, or "
            f"{more or 'start more ranks'} (frontier-llm plan searches all layouts)"
        )
    return ", or ".join([f"set {', or '.join(words)}", *([more] if more else [])])


def _more_ranks(candidate: Candidate, composed: Composed) -> int | None:
    for factor in MORE_RANKS:
        ranks = factor * candidate.grid.size
        try:
            composed(f"{SHARDED} launch.ranks={ranks}", ranks)
        except ConfigError:  # illegal, or it does not fit either
            continue
        return ranks
    return None


def _layout_changes(candidate: Candidate, composed: Composed | None) -> list[tuple[str, int]]:
    """Return the fastest fitting change of each setting, the fastest first, with its bytes."""
    budget = budget_bytes(candidate)
    fitting = [
        (_step_seconds(changed), order, overrides, changed.config)
        for order, (overrides, changed) in enumerate(_changes(candidate))
        if fullest(changed).total <= budget
    ]
    of_setting: dict[str, tuple[str, int]] = {}
    for _, _, overrides, config in sorted(fitting, key=lambda change: change[:2]):
        setting = overrides.partition("=")[0]
        if setting not in of_setting:
            size = _bytes(candidate, overrides, config, composed)
            if size is not None and size <= budget:
                of_setting[setting] = overrides, size
    return list(of_setting.values())


def _first_fitting(
    candidate: Candidate, others: Iterable[Changes], budget: int, composed: Composed | None
) -> Iterator[tuple[str, int]]:
    """Yield the first change of each group that takes at most `budget` bytes, with its bytes."""
    yielded = set()
    for group in others:
        for overrides, config in group:
            size = _bytes(candidate, overrides, config, None)
            if size is None or size > budget:
                continue
            if overrides in yielded:
                break
            size = _bytes(candidate, overrides, config, composed)
            if size is not None and size <= budget:
                yielded.add(overrides)
                yield overrides, size
                break


def _bytes(
    candidate: Candidate, overrides: str, config: RunConfig, composed: Composed | None
) -> int | None:
    """Return the bytes of the fullest stage after a change; None = the change is not legal."""
    try:
        config = composed(overrides, candidate.grid.size) if composed else config
        changed = Candidate.of(config, candidate.grid.size, candidate.grid.ranks_per_node)
    except ConfigError:
        return None
    return fullest(changed).total


def _step_seconds(candidate: Candidate) -> float:
    """Return 0 if the speed of the device is not known, so that the first change wins."""
    try:
        return step_time(candidate).seconds
    except ConfigError:
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
    """Yield more recomputation, smaller micro-batches, and more ranks of an axis."""
    for recompute in ("selective", "full"):
        if recompute != config.recompute:
            yield f"recompute={recompute}", config.model_copy(update={"recompute": recompute})
    for micro_batch in divisors(config.data.micro_batch)[:-1]:
        yield f"data.micro_batch={micro_batch}", config.changed("data", micro_batch=micro_batch)
    for axis in ("tensor", "pipeline", "context"):
        for size in divisors(ranks):
            if size > getattr(config.parallel, axis):
                values: dict[str, int | None] = {axis: size}
                if axis == "pipeline":  # a list of layers per stage fits only its own pipeline size
                    values["layers_per_stage"] = None
                yield f"parallel.{axis}={size}", config.changed("parallel", **values)
