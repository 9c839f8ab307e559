"""Choose the pipeline schedule of a run: replace the values `auto` of the section `parallel`.

The schedules of `space.orders` are compared. The fastest one whose memory fits is chosen. The
choice is a pure function of the configuration and the ranks, so all ranks of a run agree.
"""

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.memory import fullest
from frontier_llm.planner.space import Order, orders
from frontier_llm.planner.step_time import step_time

LEAST_GAIN = 0.01
"""Share of the step that a schedule with split backward passes must save to be preferred to the
fastest one with whole backward passes."""


def choose_schedule(config: RunConfig, ranks: int, ranks_per_node: int) -> RunConfig:
    """Replace `parallel.schedule=auto` and `parallel.waiting_weights=auto` by the fastest values.

    The result has 1F1B or the interleaved schedule with whole backward passes if the cluster's
    speed in this precision is not known, or if no schedule can run or fits in memory.

    Args:
        config: configuration of the run. Values that are not `auto` stay.
        ranks: number of ranks of the run.
        ranks_per_node: number of neighbouring ranks that share a node.
    """
    parallel = config.parallel
    if "auto" not in (parallel.schedule, parallel.waiting_weights):
        return config
    whole = Order("interleaved" if parallel.chunks > 1 else "1f1b", 0)
    fallback = _with_order(config, _with_given(config, whole))
    tried = dict.fromkeys(_with_given(config, order) for order in _candidates(config))
    if parallel.pipeline == 1 or list(tried) == [_with_given(config, whole)]:
        return fallback
    seconds: dict[Order, float] = {}
    for order in tried:
        try:
            candidate = Candidate.of(_with_order(config, order), ranks, ranks_per_node)
            if fullest(candidate).total <= budget_bytes(candidate):
                seconds[order] = step_time(candidate).seconds
        except ConfigError:  # this schedule cannot run, or the cluster's speed is not known
            continue
    if not seconds:
        return fallback
    fastest = min(seconds, key=lambda order: seconds[order])
    if seconds[fastest] > (1 - LEAST_GAIN) * seconds.get(whole, float("inf")):
        fastest = whole
    return _with_order(config, fastest)


def _candidates(config: RunConfig) -> list[Order]:
    """Return the schedules of `auto`; `planner.schedule` restricts only searches."""
    planner = config.planner.model_copy(update={"schedule": None})
    searched = config.model_copy(update={"planner": planner})
    return list(orders(searched, config.parallel.pipeline, config.parallel.chunks))


def _with_given(config: RunConfig, order: Order) -> Order:
    """Replace what the configuration gives."""
    parallel = config.parallel
    return Order(
        order.schedule if parallel.schedule == "auto" else parallel.schedule,
        order.waiting_weights if parallel.waiting_weights == "auto" else parallel.waiting_weights,
    )


def _with_order(config: RunConfig, order: Order) -> RunConfig:
    parallel = config.parallel.model_copy(update=order._asdict())
    return config.model_copy(update={"parallel": parallel})
