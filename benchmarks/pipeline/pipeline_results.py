"""Compute the rows of bench_pipeline from what the ranks measured."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.pipeline.pipeline_case import (
    BASELINE,
    MEGATRON,
    Case,
    Contender,
    RankFigures,
    TimedStep,
)
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.pipeline_schedule import Action, Schedule
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.planner.block import stage_activations
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.timeline import ActionSeconds, Send, simulate

TOLERANCE = 1e-4
"""Largest relative difference of losses and norms between contenders, which sum in other orders."""


@dataclass(frozen=True)
class Row:
    """Measurements of one contender in one case."""

    contender: str
    seconds: float
    """Median duration of a step on the slowest rank."""
    over_1f1b: float
    """Median over rounds of the duration divided by that of our 1F1B in the same round."""
    over_megatron: float
    """The same for megatron's schedule with as many model chunks per stage."""
    simulated_seconds: float | None
    """Median over rounds of the simulated duration; None if the actions were not timed."""
    simulated_over_measured: float | None
    """Median over rounds of the simulated duration divided by the measured one."""
    peak_bytes: int
    """Peak memory of activations on the rank with the most."""
    planned_bytes: int
    """What the planner predicts for `peak_bytes`."""
    all_seconds: tuple[float, ...]
    """Duration of each timed step on the slowest rank."""


def make_rows(case: Case, latency: float, ranks: Sequence[dict[str, RankFigures]]) -> list[Row]:
    """Return the rows of a case.

    Args:
        case: settings of the case.
        latency: seconds of a message.
        ranks: for each rank, what it measured, by contender.

    Raises:
        TrainingError: the contenders did not train the same model.
    """
    check_equal(ranks[0])
    seconds = {name: _slowest([rank[name] for rank in ranks]) for name in case.contenders}
    rows = []
    for name, contender in case.contenders.items():
        figures = [rank[name] for rank in ranks]
        has_actions = all(step.actions for rank in figures for step in rank.steps)
        simulated = _simulated(case, contender, figures, latency) if has_actions else []
        rows.append(
            Row(
                contender=name,
                seconds=statistics.median(seconds[name]),
                over_1f1b=_median_ratio(seconds[name], seconds[BASELINE]),
                over_megatron=_median_ratio(seconds[name], seconds[MEGATRON[contender.chunks]]),
                simulated_seconds=statistics.median(simulated) if simulated else None,
                simulated_over_measured=(
                    _median_ratio(simulated, seconds[name]) if simulated else None
                ),
                peak_bytes=max(rank.peak_bytes for rank in figures),
                planned_bytes=planned_bytes(case, contender),
                all_seconds=tuple(seconds[name]),
            )
        )
    return rows


def check_equal(figures: dict[str, RankFigures]) -> None:
    """Check that all contenders have the same losses and norms of gradients in every step.

    Raises:
        TrainingError: they differ.
    """
    expected = torch.tensor([figures[BASELINE].losses, figures[BASELINE].grad_norms])
    for name, found in figures.items():
        numbers = torch.tensor([found.losses, found.grad_norms])
        difference = float((numbers / expected - 1).abs().max())
        if not difference <= TOLERANCE:
            raise TrainingError(
                f"losses or gradient norms of {name} differ from those of {BASELINE} by "
                f"{difference:.1e}: they do not train the same model"
            )


def simulated_seconds(schedule: Schedule, steps: Sequence[TimedStep], latency: float) -> float:
    """Simulate the passes of a step with the mean seconds that its own actions took.

    The rest of the step is added as it was measured.

    Args:
        schedule: actions of all stages.
        steps: for each stage, the times of the step.
        latency: seconds from the end of an action to the arrival of its result.
    """
    costs = [
        _mean_costs(actions, step.actions, schedule.placement.virtual_stages)
        for actions, step in zip(schedule.actions, steps, strict=True)
    ]
    events = simulate(schedule, costs, Send(hidden=latency))
    simulated = max(event.end for event in events)
    first = min(step.actions[0][0] for step in steps)
    last = max(step.actions[-1][1] for step in steps)
    return simulated + max(step.seconds for step in steps) - (last - first)


def planned_bytes(case: Case, contender: Contender) -> int:
    """Return the memory that the planner predicts for the passes, on the rank with the most."""
    candidate = Candidate.of(case.config(contender), case.ranks, case.ranks)
    kinds = candidate.stages
    stages = [
        stage_activations(candidate, stage, kinds.by_stage[stage]) for stage in range(case.ranks)
    ]
    return max(one.kept + one.logits + one.working + one.exchange for one in stages)


def _simulated(
    case: Case, contender: Contender, figures: Sequence[RankFigures], latency: float
) -> list[float]:
    """Return the simulated duration of each timed step; `figures` are those of each rank."""
    schedule = ResolvedLayout.resolve(case.config(contender), case.ranks, case.ranks).schedule
    return [
        simulated_seconds(schedule, steps, latency)
        for steps in zip(*(rank.steps for rank in figures), strict=True)
    ]


def _mean_costs(
    actions: Sequence[Action],
    times: Sequence[tuple[float, float]],
    virtual_stages: int,
) -> list[ActionSeconds]:
    """Return the mean seconds of each kind of action, by virtual stage; 0 if there was none."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [])
    for (kind, virtual_stage, _), (start, end) in zip(actions, times, strict=True):
        found[kind, virtual_stage].append(end - start)
    means = {key: statistics.mean(durations) for key, durations in found.items()}
    return [
        ActionSeconds(*(means.get((kind, virtual_stage), 0.0) for kind in ActionSeconds._fields))
        for virtual_stage in range(virtual_stages)
    ]


def _slowest(figures: Sequence[RankFigures]) -> list[float]:
    """Return the duration of each timed step on the slowest rank."""
    return [
        max(step.seconds for step in steps)
        for steps in zip(*(rank.steps for rank in figures), strict=True)
    ]


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    )
