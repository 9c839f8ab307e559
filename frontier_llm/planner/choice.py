"""Choose what a configuration leaves to the planner: sharding factors and pipeline schedule."""

from collections.abc import Callable

from frontier_llm.config.run import RunConfig
from frontier_llm.planner.factor_choice import choose_factors
from frontier_llm.planner.schedule_choice import choose_schedule


def choose(
    config: RunConfig,
    ranks: int,
    ranks_per_node: int,
    explain: Callable[[str], object] = lambda _: None,
) -> RunConfig:
    """Replace every value `auto` that describes the layout.

    The factors are chosen first, for a schedule with whole backward passes if the schedule is
    `auto` as well. The schedule then is the fastest one that fits with these factors.

    Args:
        config: configuration of the run. Values that are not `auto` stay.
        ranks: number of ranks of the run.
        ranks_per_node: number of neighbouring ranks that share a node.
        explain: called with a line that says which sharding factors were chosen and why.

    Raises:
        ConfigError: the configuration cannot run on this number of ranks, or no factors fit.
    """
    config, choice = choose_factors(config, ranks, ranks_per_node)
    if choice:
        explain(f"sharding={config.sharding.name}: {choice}")
    return choose_schedule(config, ranks, ranks_per_node)
