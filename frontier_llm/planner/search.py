"""The best layouts of a configuration, out of all legal ones.

Branch and bound: a cut's seconds without the traffic of its states bound those of every set of
factors, its finest factors their memory. Cuts are looked at in the order of the seconds' bound; one
whose bounds are worse than what the search holds is passed over. The same configuration gives the
same answer, in the same order.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from frontier_llm.config.rules import check
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.layout import make_grid
from frontier_llm.planner.candidate import Candidate, Model
from frontier_llm.planner.engine import OURS, Engine
from frontier_llm.planner.estimate import Estimate, budget_bytes, estimate
from frontier_llm.planner.front import Front
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.memory import Activations, StageMemory, stage_activations, stage_memory
from frontier_llm.planner.space import Cut, chains, cuts
from frontier_llm.planner.step_time import step_time

Progress = Callable[[str, float], None]
"""Told what is being done, and which share is done."""


@dataclass
class Found:
    """What a search brought to light."""

    best: list[Estimate] = field(default_factory=list)
    """The best first."""
    front: list[Estimate] = field(default_factory=list)
    """What nothing beats in both memory and speed, by memory."""
    refused: Counter[str] = field(default_factory=Counter)
    """Cuts that cannot run, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """Of each reason the first cut, with the whole message."""
    looked_at: int = 0
    """Cuts that are legal."""
    judged: int = 0
    """Layouts whose step was timed: the others could not be better."""


@dataclass(frozen=True)
class _Layout:
    """A legal cut whose states fit with some factors."""

    floor: float
    """No factors are faster."""
    peak: int
    """No factors take less memory."""
    order: int
    candidate: Candidate
    time: LayoutTime
    passing: tuple[Activations, ...]
    """By kind of stage."""


@dataclass(frozen=True)
class Goal:
    """What a search is for."""

    ranks: int
    ranks_per_node: int
    engine: Engine = OURS


def search(config: RunConfig, goal: Goal, progress: Progress = lambda *_: None) -> Found:
    """Find the best layouts on so many ranks.

    Args:
        config: the model, the batch, the cluster, and in `planner` what is searched for.
        goal: on which ranks.
        progress: told how far the search is.

    Raises:
        ConfigError: the cluster's speed in this precision is not known.
    """
    found = Found()
    layouts = list(_layouts(config, goal, found, progress))
    by_memory = config.planner.objective == "memory"
    layouts.sort(key=lambda layout: (0.0 if by_memory else layout.floor, layout.order))
    kept: list[tuple[float, float, int, Candidate, LayoutTime]] = []  # worst on top
    front: Front[tuple[Candidate, LayoutTime]] = Front()
    for index, layout in enumerate(layouts):
        progress("factors", index / len(layouts))
        full = len(kept) == config.planner.rows
        slow = full and not by_memory and layout.floor >= -kept[0][0]
        if slow and front.beats(layout.peak, layout.floor):
            continue
        for candidate, peak in _fitting(layout):
            seconds = step_time(candidate, layout.time).seconds
            found.judged += 1
            front.add(peak, seconds, (candidate, layout.time))
            rank = (peak, seconds) if by_memory else (seconds, peak)
            entry = (-rank[0], -rank[1], -found.judged, candidate, layout.time)
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
    """Find the best layouts of several configurations together; see `search`."""
    together, front = Found(), Front[Estimate]()
    for number, config in enumerate(configs):

        def report(what: str, share: float, before: int = number) -> None:
            progress(what, (before + share) / len(configs))

        found = search(config, goal, report)
        together.best += found.best
        for one in found.front:
            front.add(one.peak.total, one.time.seconds, one)
        together.refused += found.refused
        together.examples = found.examples | together.examples
        together.looked_at += found.looked_at
        together.judged += found.judged
    together.front = list(front)
    planner = configs[0].planner
    if planner.objective == "memory":
        together.best.sort(key=lambda one: (one.peak.total, one.time.seconds))
    else:
        together.best.sort(key=lambda one: (one.time.seconds, one.peak.total))
    del together.best[planner.rows :]
    return together


def _layouts(config: RunConfig, goal: Goal, found: Found, progress: Progress) -> Iterator[_Layout]:
    """Yield the cuts that are legal and fit; note the others."""
    models: dict[tuple[int, int, int], Model] = {}
    everything = list(cuts(config, goal.ranks, goal.ranks_per_node))
    for order, cut in enumerate(everything):
        progress("layouts", order / len(everything))
        cut_config = cut.apply(config)
        try:
            check(cut_config, goal.ranks)
        except ConfigError as error:
            _refuse(found, error.key, f"{cut}: {error.got}; wants {error.wants}")
            continue
        found.looked_at += 1
        key = (cut.tensor, cut.pipeline, cut.chunks)
        model = Model(cut_config, like=models.get(key))
        models.setdefault(key, model)
        layout = _layout(model, goal, order, found, cut)
        if layout is not None:
            yield layout


def _layout(model: Model, goal: Goal, order: int, found: Found, cut: Cut) -> _Layout | None:
    grid = make_grid(model.config, goal.ranks, goal.ranks_per_node)
    legal = chains(model.config, grid.data)
    if not legal:
        _refuse(found, "sharding", f"{cut}: no factors that divide {grid.data} data ranks")
        return None
    candidate = Candidate(model, grid, legal[0])
    passing = tuple(stage_activations(candidate, k.first, k) for k in model.kinds)
    # cutting parameters or gradients at all costs buffers; beyond that the finer the smaller
    finest = {(factors.params > 1, factors.grads > 1): factors for factors in legal}.values()
    peaks = [_peak(Candidate(model, grid, factors), passing) for factors in finest]
    peak = min(peaks, key=lambda memory: memory.total)
    if peak.total > budget_bytes(candidate):
        _refuse(found, f"memory, most for {peak.largest}", f"{cut}: stage {peak.stage}")
        return None
    time = LayoutTime(candidate, goal.engine)
    return _Layout(time.floor_seconds(candidate), peak.total, order, candidate, time, passing)


def _fitting(layout: _Layout) -> Iterator[tuple[Candidate, int]]:
    """Yield a cut with every set of factors that fits, and its peak."""
    base = layout.candidate
    budget = budget_bytes(base)
    for factors in chains(base.config, base.grid.data):
        candidate = Candidate(base.model, base.grid, factors)
        peak = _peak(candidate, layout.passing).total
        if peak <= budget:
            yield candidate, peak


def _peak(candidate: Candidate, passing: tuple[Activations, ...]) -> StageMemory:
    memories = [
        stage_memory(candidate, kind.first, activations)
        for kind, activations in zip(candidate.model.kinds, passing, strict=True)
    ]
    return max(memories, key=lambda memory: memory.total)


def _refuse(found: Found, reason: str, example: str) -> None:
    found.refused[reason] += 1
    found.examples.setdefault(reason, example)
