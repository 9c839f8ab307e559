"""Compare the layouts that the planner would choose with the fastest measured ones.

A table may hold several layouts of one job: runs with the same model, program, ranks, sequence
length and global batch, but different tensor, pipeline and data sizes, micro-batches,
recomputation or sharding factors.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import correlation, fmean
from typing import NamedTuple

from frontier_llm.planner.measured import Prediction

LEAST_RANKED = 4
"""Smallest number of layouts of a job whose order is compared."""


class Choices(NamedTuple):
    """How well the planner chooses among the measured layouts of each job."""

    jobs: int
    """Jobs with at least two measured layouts."""
    fastest: int
    """Jobs in which the layout with the fastest prediction is the fastest measured one."""
    regret: float
    """By how much the layout with the fastest prediction is slower than the fastest measured one,
    as a share of the seconds of the latter; mean over all jobs."""
    largest_regret: float
    ranked: int
    """Jobs with at least LEAST_RANKED layouts."""
    rank_correlation: float | None
    """Spearman's rank correlation of predicted and measured seconds, mean over these jobs; None if
    there are none."""


def choices(predictions: Sequence[Prediction], *, corrects_shapes: bool = False) -> Choices | None:
    """Compare the choices of the planner with those of a measurement; None = no choice is left.

    Args:
        predictions: the predictions for a table.
        corrects_shapes: whether to divide each prediction by the mean ratio of predicted and
            measured seconds of all runs with the same shapes of matrix products. The result then
            tells what the speed of shapes does not explain.
    """
    ratios = _shape_ratios(predictions) if corrects_shapes else {}
    jobs: defaultdict[tuple[object, ...], list[_Layout]] = defaultdict(list)
    for one in predictions:
        predicted = one.estimate.time.seconds / ratios.get(_shape(one), 1.0)
        jobs[_job(one)].append(_Layout(predicted, _measured_seconds(one)))
    chosen = [job for job in jobs.values() if len(job) > 1]
    if not chosen:
        return None
    regrets = [_regret(job) for job in chosen]
    ranked = [_rank_correlation(job) for job in chosen if len(job) >= LEAST_RANKED]
    mean = fmean(ranked) if ranked else None
    fastest = regrets.count(0.0)
    return Choices(len(chosen), fastest, fmean(regrets), max(regrets), len(ranked), mean)


class _Layout(NamedTuple):
    """Seconds of a step with one layout of a job."""

    predicted: float
    measured: float


def _job(prediction: Prediction) -> tuple[object, ...]:
    """Return what all layouts of a job have in common."""
    candidate = prediction.estimate.candidate
    config = candidate.config
    return (
        config.model.model_dump_json(),
        config.planner.engine.name,
        config.cluster.name,
        candidate.layout.precision,
        candidate.grid.size,
        config.data.sequence_length,
        config.data.global_batch,
    )


def _shape(prediction: Prediction) -> tuple[int, ...]:
    """Return what determines the shapes of a layer's matrix products on a rank."""
    candidate = prediction.estimate.candidate
    config, layout = candidate.config, candidate.layout
    return config.model.hidden, layout.lengths.total, candidate.grid.tensor, layout.micro_batch


def _shape_ratios(predictions: Sequence[Prediction]) -> dict[tuple[int, ...], float]:
    """Return the mean ratio of predicted and measured seconds by shape."""
    ratios: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    for one in predictions:
        ratios[_shape(one)].append(one.estimate.time.seconds / _measured_seconds(one))
    return {shape: fmean(some) for shape, some in ratios.items()}


def _measured_seconds(prediction: Prediction) -> float:
    """Return the seconds of a step that follow from the measured quantity."""
    run = prediction.run
    if run.quantity == "measured_step_seconds":
        return run.measured
    return prediction.estimate.time.seconds * prediction.predicted / run.measured


def _regret(job: Sequence[_Layout]) -> float:
    chosen = min(job, key=lambda layout: layout.predicted)
    return chosen.measured / min(layout.measured for layout in job) - 1


def _rank_correlation(job: Sequence[_Layout]) -> float:
    predicted, measured = zip(*job, strict=True)
    return correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
