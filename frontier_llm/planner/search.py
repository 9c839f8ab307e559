"""Search the best layouts of a configuration among all legal ones.

The search is branch and bound. A cut of the model, without its factors, has a lower bound on the
seconds (no communication of model states) and one on the memory (the finest factors). Cuts are
examined in the order of the first bound, and skipped if both bounds are worse than the layouts
found so far. The search is deterministic.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.candidate import Candidate, StageKinds
from frontier_llm.planner.compute import OURS, Engine
from frontier_llm.planner.estimate import Estimate, budget_bytes, estimate
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.memory import Activations, StageMemory, stage_activations, stage_memory
from frontier_llm.planner.space import Cut, cuts, legal_factors
from frontier_llm.planner.step_time import step_time

Progress = Callable[[str, float], None]
"""Called with the name of the current phase and the share of it that is done."""
Item = TypeVar("Item")


@dataclass
class Found:
    """The result of a search."""

    best: list[Estimate] = field(default_factory=list)
    """The best layouts, best first."""
    front: list[Estimate] = field(default_factory=list)
    """The Pareto front: layouts that no other one beats in both memory and speed, by memory."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of cuts that cannot run, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first cut refused for each reason, with the full message."""
    examined: int = 0
    """Number of legal cuts."""
    timed: int = 0
    """Number of layouts whose step was timed; all others were excluded by their bounds."""


class ParetoFront(Generic[Item]):
    """Items by peak memory; each takes more bytes and fewer seconds than the previous one."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._seconds: list[float] = []
        self._items: list[Item] = []

    def beats(self, peak: int, seconds: float) -> bool:
        """Whether an item of the front takes at most so many bytes and so many seconds."""
        at = bisect_right(self._peaks, peak)
        return at > 0 and self._seconds[at - 1] <= seconds

    def add(self, peak: int, seconds: float, item: Item) -> None:
        """Add an item unless the front beats it, and remove the items that it beats."""
        if self.beats(peak, seconds):
            return
        start = end = bisect_left(self._peaks, peak)
        while end < len(self._peaks) and self._seconds[end] >= seconds:
            end += 1
        self._peaks[start:end] = [peak]
        self._seconds[start:end] = [seconds]
        self._items[start:end] = [item]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)


@dataclass(frozen=True)
class _BoundedCut:
    """A legal cut that fits with some factors, and its bounds."""

    min_seconds: float
    """Lower bound on the seconds of a step with any factors."""
    min_peak: int
    """Lower bound on the bytes of the fullest stage with any factors."""
    order: int
    candidate: Candidate
    """The cut with some factors."""
    time: LayoutTime
    activations: tuple[Activations, ...]
    """By kind of stage."""


@dataclass(frozen=True)
class Goal:
    """The ranks and the program that a search is for."""

    ranks: int
    ranks_per_node: int
    engine: Engine = OURS


def search(config: RunConfig, goal: Goal, progress: Progress = lambda *_: None) -> Found:
    """Find the best layouts of a configuration.

    Args:
        config: the model, the batch, the cluster, and in `planner` objective and constraints.
        goal: the ranks.
        progress: called with the progress of the search.

    Raises:
        ConfigError: the cluster's speed in this precision is not known.
    """
    found = Found()
    bounded = list(_bounded_cuts(config, goal, found, progress))
    by_memory = config.planner.objective == "memory"
    bounded.sort(key=lambda cut: (0.0 if by_memory else cut.min_seconds, cut.order))
    kept: list[tuple[float, float, int, Candidate, LayoutTime]] = []  # a heap, the worst first
    front: ParetoFront[tuple[Candidate, LayoutTime]] = ParetoFront()
    for index, cut in enumerate(bounded):
        progress("factors", index / len(bounded))
        full = len(kept) == config.planner.rows
        slow = full and not by_memory and cut.min_seconds >= -kept[0][0]
        if slow and front.beats(cut.min_peak, cut.min_seconds):
            continue
        for candidate, peak in _fitting(cut):
            seconds = step_time(candidate, cut.time).seconds
            found.timed += 1
            front.add(peak, seconds, (candidate, cut.time))
            rank = (peak, seconds) if by_memory else (seconds, peak)
            entry = (-rank[0], -rank[1], -found.timed, candidate, cut.time)
            if len(kept) < config.planner.rows:
                heapq.heappush(kept, entry)
            elif entry[:3] > kept[0][:3]:
                heapq.heapreplace(kept, entry)
    ranked = sorted(kept, key=lambda entry: entry[:3], reverse=True)
    found.best = [estimate(candidate, layout=time) for *_, candidate, time in ranked]
    found.front = [estimate(candidate, layout=time) for candidate, time in front]
    return found


def search_all(
    configs: Sequence[RunConfig], goal: Goal, progress: Progress = lambda *_: None
) -> Found:
    """Find the best layouts among several configurations; see `search`."""
    together, front = Found(), ParetoFront[Estimate]()
    for number, config in enumerate(configs):

        def report(what: str, share: float, before: int = number) -> None:
            progress(what, (before + share) / len(configs))

        found = search(config, goal, report)
        together.best += found.best
        for one in found.front:
            front.add(one.peak.total, one.time.seconds, one)
        together.refused += found.refused
        together.examples = found.examples | together.examples
        together.examined += found.examined
        together.timed += found.timed
    together.front = list(front)
    planner = configs[0].planner
    if planner.objective == "memory":
        together.best.sort(key=lambda one: (one.peak.total, one.time.seconds))
    else:
        together.best.sort(key=lambda one: (one.time.seconds, one.peak.total))
    del together.best[planner.rows :]
    return together


def _bounded_cuts(
    config: RunConfig, goal: Goal, found: Found, progress: Progress
) -> Iterator[_BoundedCut]:
    """Yield the cuts that are legal and fit; record in `found` why others are refused."""
    stages: dict[tuple[int, int, int], StageKinds] = {}
    everything = list(cuts(config, goal.ranks, goal.ranks_per_node))
    for order, cut in enumerate(everything):
        progress("layouts", order / len(everything))
        cut_config = cut.apply(config)
        try:
            layout = ResolvedLayout.resolve(
                cut_config, goal.ranks, goal.ranks_per_node, ignore_sharding=True
            )
        except ConfigError as error:
            _refuse(found, error.key, f"{cut}: {error.got}; wants {error.wants}")
            continue
        found.examined += 1
        key = (cut.tensor, cut.pipeline, cut.chunks)
        if key not in stages:
            stages[key] = StageKinds(layout)
        candidate = Candidate(cut_config, layout, stages[key])
        bounded = _bounded_cut(candidate, goal.engine, order, found, cut)
        if bounded is not None:
            yield bounded


def _bounded_cut(
    candidate: Candidate, engine: Engine, order: int, found: Found, cut: Cut
) -> _BoundedCut | None:
    data, kinds = candidate.grid.data, candidate.stages.kinds
    legal = legal_factors(candidate.config, data)
    if not legal:
        _refuse(found, "sharding", f"{cut}: no factors that divide {data} data ranks")
        return None
    activations = tuple(stage_activations(candidate.layout, k.first, k) for k in kinds)
    # cutting parameters or gradients at all needs buffers; apart from those, finer is smaller
    finest = {(factors.params > 1, factors.grads > 1): factors for factors in legal}.values()
    peaks = [_peak(candidate.with_factors(factors), activations) for factors in finest]
    peak = min(peaks, key=lambda memory: memory.total)
    if peak.total > budget_bytes(candidate):
        _refuse(found, f"memory, most for {peak.largest}", f"{cut}: stage {peak.stage}")
        return None
    time = LayoutTime(candidate, engine)
    seconds = time.floor_seconds(candidate)
    return _BoundedCut(seconds, peak.total, order, candidate, time, activations)


def _fitting(cut: _BoundedCut) -> Iterator[tuple[Candidate, int]]:
    """Yield a cut with every set of factors that fits, and its peak bytes."""
    base = cut.candidate
    budget = budget_bytes(base)
    for factors in legal_factors(base.config, base.grid.data):
        candidate = base.with_factors(factors)
        peak = _peak(candidate, cut.activations).total
        if peak <= budget:
            yield candidate, peak


def _peak(candidate: Candidate, activations: tuple[Activations, ...]) -> StageMemory:
    memories = [
        stage_memory(candidate, kind.first, of_kind)
        for kind, of_kind in zip(candidate.stages.kinds, activations, strict=True)
    ]
    return max(memories, key=lambda memory: memory.total)


def _refuse(found: Found, reason: str, example: str) -> None:
    found.refused[reason] += 1
    found.examples.setdefault(reason, example)
