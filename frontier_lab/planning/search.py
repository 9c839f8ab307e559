"""Search the best layouts of a configuration among all legal ones.

A layout is a cut of the model (`cuts.Cut`: tensor, pipeline and context sizes, chunks, schedule,
micro-batch and recomputation) together with sharding factors. The search is branch and bound. Each
cut has two lower bounds: one on its step time, without communication of model states, and one on
its memory, with the finest sharding factors. A cut that does not fit by the second bound is
refused.

With the objective `memory`, every cut that fits is examined. With the others, cuts are examined in
ascending order of the bound on the time, and a cut is skipped if its bounds show that it is neither
one of the fastest layouts nor on the Pareto front of time and memory. The long list of actions of a
schedule with split backward passes is made, and then simulated, only if the bounds do not exclude
the cut. Layouts in nearly full memory are judged slower than predicted, and of layouts that are
nearly as fast as the fastest, the roomiest comes first (`ranked`). The search is
deterministic.
"""

import gc
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from frontier_lab.planning.bounds import (
    Item,
    ParetoFront,
    least_activations,
    least_bytes,
    peak_bytes,
)
from frontier_lab.planning.cuts import Cut, cuts
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.host_pool import STATE_BYTES
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.pipeline_schedule import Placement
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import FP32_BYTES
from frontier_llm.planner.block import Activations, stages_activations
from frontier_llm.planner.candidate import Candidate, StageKinds
from frontier_llm.planner.estimate import (
    FREE_COST,
    Estimate,
    budget_bytes,
    estimate,
    judged_seconds,
)
from frontier_llm.planner.layer_split import balanced_layers
from frontier_llm.planner.layout_time import LayoutTime, Rates
from frontier_llm.planner.memory import fullest_of, kinds_activations
from frontier_llm.planner.space import Order, legal_factors, with_grown_batch
from frontier_llm.planner.step_time import step_seconds
from frontier_llm.units import GIB, counted, format_bytes

Progress = Callable[[str, float], None]
"""Function that is called with the name of the current phase and the share of it that is done."""
PROGRESS_STEP = 0.01
LEAST_KEPT = 10
"""Number of layouts that are kept at least, among which the roomiest of the fastest are found."""


@dataclass
class Found:
    """The result of a search."""

    best: list[Estimate] = field(default_factory=list)
    """The best layouts, best first: of each cut the one with its best sharding factors."""
    front: list[Estimate] = field(default_factory=list)
    """The Pareto front: layouts that no other layout beats in both memory and speed, ascending by
    memory."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of cuts of the model that cannot run, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason, the first cut that was refused, with the full message."""
    examined: int = 0
    """Number of cuts that can be resolved to a layout."""
    timed: int = 0
    """Number of layouts (cuts with factors) whose step time was predicted. The bounds excluded all
    others."""


@dataclass(frozen=True)
class _BoundedCut:
    """A legal cut that may fit in memory, and its lower bounds for any sharding factors."""

    cut: Cut
    min_seconds: float
    min_peak: int
    order: int
    """Position of the cut in the search space, which decides between equal cuts."""
    candidate: Candidate
    """The cut with arbitrary sharding factors."""
    time: LayoutTime
    activations: tuple[Activations, ...]
    """Activations of each kind of stage, or lower bounds on them. Stages of one kind need equal
    memory and time (`StageKinds`)."""
    of_stages: list[Activations] | None = None

    @property
    def bounds(self) -> tuple[int, float]:
        return self.min_peak, self.min_seconds


@dataclass(frozen=True)
class Goal:
    """The ranks for which layouts are searched."""

    ranks: int
    ranks_per_node: int


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would scan millions of tuples of schedules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collector()
def search(config: RunConfig, goal: Goal, progress: Progress = lambda *_: None) -> Found:
    """Find the best layouts of a configuration.

    `config.planner` has the objective and the values to which the search is restricted.
    """
    found, progress = Found(), _in_steps(progress)
    bounded_cuts = list(_bounded_cuts(config, goal, found, progress))
    by_memory = {"throughput": False, "memory": True, "nodes": False}[config.planner.objective]
    bounded_cuts.sort(key=lambda cut: (0.0 if by_memory else cut.min_seconds, cut.order))
    kept = max(LEAST_KEPT, config.planner.rows)
    # A heap of the best layouts, the worst of them first. The first three numbers are negative:
    # judged seconds and bytes (or bytes and seconds), and the place in the search space.
    best: list[tuple[float, float, tuple[int, int], Candidate, _BoundedCut]] = []
    front: ParetoFront[tuple[Candidate, _BoundedCut]] = ParetoFront()
    for index, cut in enumerate(bounded_cuts):
        progress("factors", index / len(bounded_cuts))
        slowest = -best[0][0] if len(best) == kept and not by_memory else math.inf
        exact = _refined(cut, found, slowest, front)
        if exact is None:
            continue
        entries = []
        for candidate, peak in _fitting(exact, slowest, front):
            seconds = step_seconds(candidate, cut.time)
            found.timed += 1
            front.add(peak, seconds, (candidate, exact))
            judged = judged_seconds(candidate, seconds, peak)
            first, second = (peak, seconds) if by_memory else (judged, peak)
            place = -cut.order, -found.timed
            entries.append((-first, -second, place, candidate, exact))
        # of a cut only the best factors count; the place decides between equal ones
        best += [max(entries, key=lambda entry: entry[:3])] if entries else []
        heapq.heapify(best)
        if len(best) > kept:
            heapq.heappop(best)
    best.sort(key=lambda entry: entry[:3], reverse=True)
    layouts = [estimate(layout, cut.time, cut.of_stages) for *_, layout, cut in best]
    found.best = ranked(layouts, config.planner.objective)[: config.planner.rows]
    found.front = [estimate(layout, cut.time, cut.of_stages) for layout, cut in front]
    return found


def _in_steps(progress: Progress) -> Progress:
    """Return a function that reports a phase at most every PROGRESS_STEP, as drawing takes time."""
    last: tuple[str, float] = ("", 0.0)

    def report(phase: str, share: float) -> None:
        nonlocal last
        if phase != last[0] or share >= last[1] + PROGRESS_STEP:
            last = phase, share
            progress(phase, share)

    return report


def search_all(
    configs: Sequence[RunConfig], goal: Goal, progress: Progress = lambda *_: None
) -> Found:
    """Find the best layouts among several configurations, as `search` does for one."""
    merged, front = Found(), ParetoFront[Estimate]()
    for index, config in enumerate(configs):

        def report(phase: str, share: float, searched: int = index) -> None:
            progress(phase, (searched + share) / len(configs))

        found = search(config, goal, report)
        merged.best += found.best
        for layout in found.front:
            front.add(layout.peak.total, layout.time.seconds, layout)
        merged.refused += found.refused
        merged.examples = found.examples | merged.examples
        merged.examined += found.examined
        merged.timed += found.timed
    merged.front = list(front)
    planner = configs[0].planner
    merged.best = ranked(merged.best, planner.objective)[: planner.rows]
    return merged


def ranked(layouts: Sequence[Estimate], objective: str) -> list[Estimate]:
    """Return layouts with the best first: of those that are nearly as fast, the roomiest."""
    if objective == "memory":
        return sorted(layouts, key=lambda layout: (layout.peak.total, layout.time.seconds))
    by_speed = sorted(layouts, key=lambda layout: (layout.judged_seconds, layout.peak.total))
    near = nearly_equal(by_speed)
    return sorted(by_speed[:near], key=lambda layout: layout.peak.total) + by_speed[near:]


def nearly_equal(layouts: Sequence[Estimate]) -> int:
    """Return how many layouts are at most FREE_COST slower than the fastest, as they are judged."""
    fastest = min((layout.judged_seconds for layout in layouts), default=0.0)
    return sum(layout.judged_seconds <= (1 + FREE_COST) * fastest for layout in layouts)


def _bounded_cuts(
    config: RunConfig, goal: Goal, found: Found, progress: Progress
) -> Iterator[_BoundedCut]:
    """Yield the cuts that are legal and fit in memory. Count the others in `found.refused`.

    Each cut is tried with an even split of the layers and, if that fits, with a balanced one.
    """
    # the kinds of stages by tensor and context size, placement and layers of the model chunks
    stage_kinds: dict[tuple[int, int, Placement, object], StageKinds] = {}
    rates: dict[Grid, Rates] = {}
    splits: dict[tuple[Cut, Placement], tuple[int, ...] | None] = {}
    all_cuts = list(cuts(config, goal.ranks, goal.ranks_per_node))
    least = count_parameters(config.model, config.data.sequence_length) * FP32_BYTES / goal.ranks
    if config.optimizer.name == "adamw":
        least *= STATE_BYTES // FP32_BYTES
    if least > config.planner.memory_share * config.cluster.device.memory_gib * GIB:
        for cut in all_cuts:
            _refuse(found, "memory", f"{cut}: at least {format_bytes(least)} of states per rank")
        return

    def bounded(cut: Cut, order: int) -> _BoundedCut | None:
        cut_config = cut.apply(config)
        try:
            layout = ResolvedLayout.resolve(
                cut_config, goal.ranks, goal.ranks_per_node, ignore_sharding=True
            )
        except ConfigError as error:
            _refuse(found, error.key, f"{cut}: {error.got}; wants {error.wants}")
            return None
        found.examined += 1
        key = (cut.tensor, cut.context, layout.placement, cut.layers_per_stage)
        if key not in stage_kinds:
            stage_kinds[key] = StageKinds(layout)
        candidate = Candidate(cut_config, layout, stage_kinds[key])
        return _bounded_cut(candidate, order, found, cut, rates)

    for order, cut in enumerate(all_cuts):
        progress("layouts", order / len(all_cuts))
        even = bounded(cut, order)
        if even is None:
            continue
        yield even
        layers = _balanced(even, splits)
        other = bounded(replace(cut, layers_per_stage=layers), order) if layers else None
        if other is not None:
            yield other


def _balanced(
    even: _BoundedCut, known: dict[tuple[Cut, Placement], tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """Return balanced layers; the schedule hardly changes costs of stages, only their placement.

    None also if all layers are alike: little is gained, and a search would take twice as long.
    """
    layout = even.candidate.layout
    if not even.time.rates.has_unlike_layers:
        return None
    key = (replace(even.cut, order=Order("1f1b", 0)), layout.placement)
    if key not in known:
        known[key] = balanced_layers(layout, even.time)
    return known[key]


def _bounded_cut(
    candidate: Candidate, order: int, found: Found, cut: Cut, rates: dict[Grid, Rates]
) -> _BoundedCut | None:
    """Return a cut with its bounds; `rates` are those that are known.

    None if no sharding factors are legal, or if the cut does not fit into memory with any of them.
    `found.refused` then counts it.
    """
    if not legal_factors(candidate.config, candidate.grid, candidate.factors):
        data, wanted = candidate.grid.data, candidate.config.planner.survives
        survival = "" if wanted == "nothing" else f" and survive the loss of a {wanted}"
        _refuse(found, "sharding", f"{cut}: no factors that divide {data} data ranks{survival}")
        return None
    activations = least_activations(candidate)
    peak = _least_peak(candidate, activations, found, cut)
    if peak is None:
        return None
    time = LayoutTime(candidate, rates.get(candidate.grid))
    rates[candidate.grid] = time.rates
    return _BoundedCut(cut, time.bound_seconds, peak, order, candidate, time, activations)


def _refined(
    cut: _BoundedCut, found: Found, slowest: float, front: ParetoFront[Item]
) -> _BoundedCut | None:
    """Return a cut with the activations of its schedule; None if bounds exclude it.

    `slowest` are the seconds of the slowest of the best layouts; infinite = any time is acceptable.
    """
    if cut.min_seconds >= slowest and front.beats(*cut.bounds):
        return None
    if not cut.candidate.layout.splits_backward:
        return cut
    if _is_excluded(cut, slowest, front):
        return None
    of_stages = stages_activations(cut.candidate)
    activations = kinds_activations(cut.candidate, of_stages)
    if _least_peak(cut.candidate, activations, found, cut.cut) is None:
        return None
    exact = replace(cut, activations=activations, of_stages=of_stages)
    return None if _is_excluded(exact, slowest, front) else exact


def _is_excluded(cut: _BoundedCut, slowest: float, front: ParetoFront[Item]) -> bool:
    """Whether lower bounds exclude the cut with each set of factors."""
    for candidate, peak in _fitting(cut, slowest, front):
        seconds = step_seconds(candidate, cut.time, is_least=True)
        if seconds < slowest or not front.beats(peak, seconds):
            return False
    return True


def _fitting(
    cut: _BoundedCut, slowest: float, front: ParetoFront[Item]
) -> Iterator[tuple[Candidate, int]]:
    """Yield the cut with each set of factors with which it fits, and the peak bytes.

    Factors are left out if bounds on their memory and on the time of the cut exclude them.
    """
    base, is_slow = cut.candidate, cut.min_seconds >= slowest
    limit: float = budget_bytes(base) + 1
    for factors in legal_factors(base.config, base.grid, base.factors):
        if is_slow:
            limit = min(limit, front.room(cut.min_seconds))
        if least_bytes(base, factors, cut.activations) < limit:
            candidate = base.with_factors(factors)
            peak = peak_bytes(candidate, cut.activations, limit)
            if peak < limit:
                yield candidate, peak


def _least_peak(
    candidate: Candidate, activations: tuple[Activations, ...], found: Found, cut: Cut
) -> int | None:
    """Return the least peak memory with any sharding factors; None if it is too much."""
    legal = legal_factors(candidate.config, candidate.grid, candidate.factors)
    # Larger factors need less memory, except that sharded parameters and sharded gradients each
    # need buffers. So the minimum is among the largest factors with and without such sharding.
    finest = {(factors.params > 1, factors.grads > 1): factors for factors in legal}.values()
    least, roomiest = math.inf, candidate
    for each in map(candidate.with_factors, finest):
        bytes_ = peak_bytes(each, activations, least)
        if bytes_ < least:
            least, roomiest = bytes_, each
    if least > budget_bytes(candidate):
        peak = fullest_of(roomiest, activations)
        _refuse(found, f"memory, most for {peak.largest}", f"{cut}: stage {peak.stage}")
        return None
    return int(least)


def _refuse(found: Found, reason: str, example: str) -> None:
    found.refused[reason] += 1
    found.examples.setdefault(reason, example)


@dataclass(frozen=True)
class Point:
    """The best layouts on one number of nodes."""

    nodes: int
    strong: Estimate | None
    """The best layout for the configured batch; None = no layout fits."""
    weak: Estimate | None
    """The best layout for a batch that grows with the nodes; None = no layout fits."""
    strong_efficiency: float | None
    """Tokens per second and device of `strong`, relative to the first point."""
    weak_efficiency: float | None
    """Tokens per second and device of `weak`, relative to the first point."""


def scaling_curves(configs: Sequence[RunConfig], progress: Progress) -> list[Point]:
    """Search on each number of `planner.nodes`, with a fixed and with a growing batch.

    The best layout of all configurations is taken. On the first number of nodes, the growing batch
    is the configured batch.
    """
    node_counts = configs[0].planner.nodes or ()
    points: list[Point] = []
    grown_configs = [
        [with_grown_batch(config, nodes, node_counts[0]) for config in configs]
        for nodes in node_counts
    ]
    for index, nodes in enumerate(node_counts):
        progress(counted(nodes, "node"), index / len(node_counts))
        strong = _best(configs, nodes)
        weak = _best(grown_configs[index], nodes)
        first = points[0] if points else None
        points.append(
            Point(
                nodes,
                strong,
                weak,
                _efficiency(strong, first.strong if first else strong),
                _efficiency(weak, first.weak if first else weak),
            )
        )
    return points


def fewest_nodes(configs: Sequence[RunConfig], progress: Progress) -> Found:
    """Search on ascending numbers of `planner.nodes` until `planner.goal_tokens_per_second` is met.

    Raises:
        ConfigError: the goal or the list of nodes is missing, or the goal is never reached.
    """
    config = configs[0]
    goal, node_counts = config.planner.goal_tokens_per_second, sorted(config.planner.nodes or ())
    if goal is None or not node_counts:
        raise ConfigError(
            "planner.goal_tokens_per_second" if node_counts else "planner.nodes",
            "null",
            "a speed in tokens per second, and a list of nodes: planner.objective=nodes looks for "
            "the fewest nodes that reach this speed",
            "set planner.goal_tokens_per_second=1e6 planner.nodes=[8,16,32,64]",
        )
    best = 0.0
    for index, nodes in enumerate(node_counts):
        progress(counted(nodes, "node"), index / len(node_counts))
        found = search_all(configs, _goal(config, nodes))
        best = max([best, *(estimated.tokens_per_second for estimated in found.best)])
        if best >= goal:
            return found
    raise ConfigError(
        "planner.goal_tokens_per_second",
        f"{goal:g}",
        f"at most {best:g}, the most that {config.cluster.name} reaches on {node_counts} nodes",
        "allow more nodes in planner.nodes, or a larger data.global_batch",
    )


def _best(configs: Sequence[RunConfig], nodes: int) -> Estimate | None:
    found = search_all(configs, _goal(configs[0], nodes))
    return found.best[0] if found.best else None


def _goal(config: RunConfig, nodes: int) -> Goal:
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    return Goal(nodes * per_node, per_node)


def _efficiency(here: Estimate | None, first: Estimate | None) -> float | None:
    if here is None or first is None:
        return None
    return here.tokens_per_device / first.tokens_per_device
