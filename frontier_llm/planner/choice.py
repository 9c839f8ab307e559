"""Choose what a configuration leaves to the planner: context, layers, factors and schedule."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flops import has_unlike_layers
from frontier_llm.geometry.grid import data_ranks_per_node
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.candidate import Candidate, StageKinds
from frontier_llm.planner.estimate import FREE_COST, FREE_SHARE, budget_bytes, judged_seconds
from frontier_llm.planner.layer_split import GAIN_OF_EQUAL_LAYERS, LEAST_GAIN, balanced_layers
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.memory import StageMemory, fullest, fullest_of, kinds_activations
from frontier_llm.planner.space import Order, context_sizes, legal_factors, orders
from frontier_llm.planner.step_time import StepTime, step_time
from frontier_llm.units import format_bytes, format_seconds


def choose(
    config: RunConfig,
    ranks: int,
    ranks_per_node: int,
    explain: Callable[[str], object] = lambda _: None,
) -> RunConfig:
    """Replace every value `auto` that describes the layout.

    The factors are chosen first, for a schedule with whole backward passes if the schedule is
    `auto` as well. If the layers are, a split that balances the stages is compared with an even
    one, and if the context ranks are, all numbers of them. `explain` is called with lines that say
    what was chosen and why.

    Raises:
        ConfigError: the configuration cannot run on these ranks, or no factors fit.
    """
    if config.parallel.context == "auto":
        return _choose_context(config, ranks, ranks_per_node, explain)
    if config.parallel.layers_per_stage == "auto":
        return _choose_layers(config, ranks, ranks_per_node, explain)
    config, choice = choose_factors(config, ranks, ranks_per_node)
    if choice:
        explain(f"sharding={config.sharding.name}: {choice}")
    return choose_schedule(config, ranks, ranks_per_node)


def _choose_context(
    config: RunConfig, ranks: int, ranks_per_node: int, explain: Callable[[str], object]
) -> RunConfig:
    """Choose everything for each number of context ranks, and take the fastest that fits.

    A larger number is taken only if it saves LEAST_GAIN of a step, or if no smaller one fits.
    """
    data_ranks = max(1, ranks // (config.parallel.tensor * config.parallel.pipeline))
    chosen, fastest, lines, tried = None, math.inf, list[str](), dict[int, str]()
    refused: ConfigError | None = None
    for context in context_sizes(config, data_ranks):
        others = list[str]()
        try:
            other = config.changed("parallel", context=context)
            other = choose(other, ranks, ranks_per_node, others.append)
            seconds = _fitting_seconds(other, ranks, ranks_per_node)
        except ConfigError as error:  # not legal, or nothing fits
            refused = refused or error
            continue
        tried[context] = "too large" if seconds == math.inf else format_seconds(seconds)
        if chosen is None or seconds < (1 - LEAST_GAIN) * fastest:
            chosen, lines, fastest = other, others, seconds
    if chosen is None:
        raise refused or AssertionError
    steps = ", ".join(f"{context}: {words}" for context, words in tried.items())
    for line in (*lines, f"parallel.context={chosen.parallel.context}; predicted steps: {steps}"):
        explain(line)
    return chosen


def _choose_layers(
    config: RunConfig, ranks: int, ranks_per_node: int, explain: Callable[[str], object]
) -> RunConfig:
    """Choose everything for an even split of the layers, and for one that balances the stages.

    The balanced one is taken if it saves LEAST_GAIN of a step (GAIN_OF_EQUAL_LAYERS if all layers
    are alike), or if it alone fits in memory.
    """
    least = LEAST_GAIN if has_unlike_layers(config.model) else GAIN_OF_EQUAL_LAYERS
    lines, others, refused = list[str](), list[str](), None
    chosen = config.changed("parallel", layers_per_stage=None)
    try:
        chosen = choose(chosen, ranks, ranks_per_node, lines.append)
    except ConfigError as error:
        refused = error
    layers = _balanced(chosen, ranks, ranks_per_node)
    if layers is not None:
        with suppress(ConfigError):  # no factors fit with these layers
            other = config.changed("parallel", layers_per_stage=layers)
            other = choose(other, ranks, ranks_per_node, others.append)
            even = math.inf if refused else _fitting_seconds(chosen, ranks, ranks_per_node)
            seconds = _fitting_seconds(other, ranks, ranks_per_node)
            if seconds < (1 - least) * even:
                gain = "" if even == math.inf else f", {1 - seconds / even:.0%} less than evenly"
                line = f"parallel.layers_per_stage: {format_layers(layers)} balances the stages"
                chosen, refused, lines = other, None, [*others, line + gain]
    if refused:
        raise refused
    for line in lines:
        explain(line)
    return chosen


def format_layers(layers: Sequence[int] | str | None) -> str:
    """Return a value of `parallel.layers_per_stage` as on a command line."""
    return "null" if layers is None else f"[{','.join(map(str, layers))}]"


def _balanced(config: RunConfig, ranks: int, ranks_per_node: int) -> tuple[int, ...] | None:
    """Return the balanced layers; None = evenly is as good, or the speed is not known."""
    try:
        layout = ResolvedLayout.resolve(config, ranks, ranks_per_node, ignore_sharding=True)
        time = LayoutTime(Candidate(config, layout, StageKinds(layout)))
    except ConfigError:
        return None
    return balanced_layers(layout, time)


def _fitting_seconds(config: RunConfig, ranks: int, ranks_per_node: int) -> float:
    """Return the seconds of a step as a plan judges them; infinite = it does not fit in memory.

    They are 0 if the speed of the cluster is not known.
    """
    candidate = Candidate.of(config, ranks, ranks_per_node)
    peak = fullest(candidate).total
    if peak > budget_bytes(candidate):
        return math.inf
    try:
        return judged_seconds(candidate, step_time(candidate).seconds, peak)
    except ConfigError:
        return 0.0


@dataclass(frozen=True)
class FactorChoice:
    """The chosen factors, with the prediction by which they were chosen."""

    factors: Factors
    peak: StageMemory
    time: StepTime | None
    """Predicted step; None = the cluster's speed is not known, and the smallest factors that fit
    were chosen."""
    next_best: "FactorChoice | None"
    """The second best factors that fit."""
    fitting: int
    """Number of sets of factors that fit in memory."""
    legal: int

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; 0 if the cluster's speed is not known."""
        return self.time.seconds if self.time else 0.0

    def __str__(self) -> str:
        text = (
            f"factors {self.factors.in_words} (parameters/gradients/optimizer states), "
            f"{format_bytes(self.peak.total)}: "
        )
        if self.time is None:
            return text + (
                "the smallest of the factors that fit in memory, because the speed of the cluster "
                "is not known"
            )
        text += (
            f"{format_seconds(self.seconds)} per step predicted; {self.fitting} of {self.legal} "
            "legal sets of factors fit in memory"
        )
        if self.next_best is None or self.next_best.time is None:
            return text
        other = self.next_best
        difference = other.seconds / self.seconds - 1
        return f"{text}. Next best: {other.factors.in_words}, {difference:+.2%} per step" + (
            _reason(self, other)
        )


def choose_factors(
    config: RunConfig, ranks: int, ranks_per_node: int
) -> tuple[RunConfig, FactorChoice | None]:
    """Replace the sharding factors `auto` by the fastest ones that fit in memory.

    All factors that are legal for the run's own ranks, batch and message formats are predicted.
    Factors that leave some memory free are preferred where this costs less than 1% of a step. 286
    sets of factors, of 1024 data ranks, take a third of a second. The choice is a pure function of
    its arguments, so all ranks of a run agree; it is None if no factor is `auto`. The factors come
    from AMSP (arXiv:2311.00257), whose planner also minimises predicted time.
    """
    sharding = config.sharding
    if {sharding.params, sharding.grads, sharding.optimizer} != {"auto"}:
        return config, None
    choice = _choose(config, ranks, ranks_per_node)
    return config.changed("sharding", **choice.factors.by_key), choice


def _choose(config: RunConfig, ranks: int, ranks_per_node: int) -> FactorChoice:
    layout = ResolvedLayout.resolve(config, ranks, ranks_per_node, ignore_sharding=True)
    base = Candidate(config, layout, StageKinds(layout))
    activations, budget = kinds_activations(base), budget_bytes(base)
    legal = legal_factors(config, layout.grid, layout.factors)
    node = data_ranks_per_node(layout.grid) or 1
    peaks = {
        factors: fullest_of(base.with_factors(factors), activations)
        for factors in sorted(legal, key=lambda factors: _preference(factors, node))
    }
    fitting = {factors: peak for factors, peak in peaks.items() if peak.total <= budget}
    if not fitting:
        raise _nothing_fits(config, list(peaks.values()), budget)
    times = _times(base, list(fitting))
    ranked = _ranked(fitting, times, budget) if times else list(fitting)
    choice: FactorChoice | None = None
    for factors in reversed(ranked[:2]):
        choice = FactorChoice(
            factors, fitting[factors], times.get(factors), choice, len(fitting), len(legal)
        )
    assert choice is not None
    return choice


def _times(base: Candidate, fitting: list[Factors]) -> dict[Factors, StepTime]:
    """Predict the step with each set of factors; empty if the cluster's speed is not known."""
    try:
        layout_time = LayoutTime(base)
    except ConfigError:
        return {}
    return {factors: step_time(base.with_factors(factors), layout_time) for factors in fitting}


def _ranked(
    fitting: dict[Factors, StageMemory], times: dict[Factors, StepTime], budget: int
) -> list[Factors]:
    """Return the factors by speed, those first that leave memory free if this costs little."""
    by_speed = sorted(fitting, key=lambda factors: times[factors].seconds)
    limit = (1 + FREE_COST) * times[by_speed[0]].seconds
    roomy = [
        factors for factors in by_speed
        if fitting[factors].total <= (1 - FREE_SHARE) * budget and times[factors].seconds <= limit
    ]  # fmt: skip
    return roomy + [factors for factors in by_speed if factors not in roomy]


def _preference(factors: Factors, node: int) -> tuple[int, ...]:
    """Return a sort key for factors that are equally fast, or whose speed is not known.

    Factors that stay inside a node come first, then small factors of parameters, which are gathered
    in every micro-batch, of gradients, and of optimizer states. AMSP prefers the same order.
    """
    sizes = (factors.params, factors.grads, factors.optimizer)
    return (*(size > node for size in sizes), *sizes)


def _reason(best: FactorChoice, other: FactorChoice) -> str:
    """Name the part of a step that takes longest in addition with the other factors."""
    assert best.time is not None
    assert other.time is not None
    if other.seconds < best.seconds:
        return f", but less than {FREE_SHARE:.0%} of the memory is free"
    more = {name: seconds - best.time.parts[name] for name, seconds in other.time.parts.items()}
    part = max(more, key=lambda name: more[name])
    if more[part] <= 0:
        return ""
    return f", with {format_seconds(more[part])} more for {part.replace('_', ' ')}"


def _nothing_fits(config: RunConfig, peaks: list[StageMemory], budget: int) -> ConfigError:
    least = min(peaks, key=lambda peak: peak.total)
    device = config.cluster.device
    return ConfigError(
        "sharding",
        f"auto: at least {format_bytes(least.total)} on a rank of stage {least.stage}, most of it "
        f"for {least.largest}",
        f"at most {format_bytes(budget)}: {config.planner.memory_share:.0%} of the "
        f"{device.memory_gib:g} GiB of {device.name} (cluster={config.cluster.name})",
        "raise parallel.tensor or parallel.pipeline, set recompute=full, or start more ranks",
    )


def choose_schedule(config: RunConfig, ranks: int, ranks_per_node: int) -> RunConfig:
    """Replace `parallel.schedule=auto` and `parallel.waiting_weights=auto` by the fastest values.

    The schedules of `space.orders` are compared; the fastest one whose memory fits is chosen. The
    result has 1F1B or the interleaved schedule with whole backward passes if the cluster's speed in
    this precision is not known, or if no schedule can run or fits in memory.
    """
    parallel = config.parallel
    if "auto" not in (parallel.schedule, parallel.waiting_weights):
        return config
    whole = Order("interleaved" if parallel.chunks > 1 else "1f1b", 0)
    fallback = config.changed("parallel", **_with_given(config, whole)._asdict())
    tried = dict.fromkeys(
        _with_given(config, order) for order in orders(config, parallel.pipeline, parallel.chunks)
    )
    if parallel.pipeline == 1 or list(tried) == [_with_given(config, whole)]:
        return fallback
    seconds: dict[Order, float] = {}
    for order in tried:
        try:
            ordered = config.changed("parallel", **order._asdict())
            candidate = Candidate.of(ordered, ranks, ranks_per_node)
            if fullest(candidate).total <= budget_bytes(candidate):
                seconds[order] = step_time(candidate).seconds
        except ConfigError:  # this schedule cannot run, or the cluster's speed is not known
            continue
    if not seconds:
        return fallback
    fastest = min(seconds, key=lambda order: seconds[order])
    if seconds[fastest] > (1 - LEAST_GAIN) * seconds.get(whole, float("inf")):
        fastest = whole
    return config.changed("parallel", **fastest._asdict())


def _with_given(config: RunConfig, order: Order) -> Order:
    parallel = config.parallel
    return Order(
        order.schedule if parallel.schedule == "auto" else parallel.schedule,
        order.waiting_weights if parallel.waiting_weights == "auto" else parallel.waiting_weights,
    )
