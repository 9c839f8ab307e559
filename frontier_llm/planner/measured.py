"""Compare predictions with measured speeds of runs.

A measured run is a row of a table (cli/measured_table.py). If the table leaves a part of a set-up
open, a run has several candidates, and the fastest one is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.step_time import step_time

QUANTITIES: dict[str, Callable[[Estimate], float]] = {
    "measured_step_seconds": lambda estimated: estimated.time.seconds,
    "measured_tflops": lambda estimated: estimated.model_tflops,
    "measured_hfu_tflops": lambda estimated: estimated.hardware_tflops,
    "measured_tokens_per_second": lambda estimated: (
        estimated.tokens_per_second / estimated.candidate.grid.size
    ),
}
"""The measured quantities, by name of their column. All but the first are per device."""


@dataclass(frozen=True)
class MeasuredRun:
    """A measured speed and the layouts that may have reached it."""

    row: int
    """Number of the row in its table, from 1."""
    label: str
    """The cells that describe the run."""
    quantity: str
    """A key of `QUANTITIES`."""
    measured: float
    rounding: float
    """Largest error of rounding of the measured value."""
    candidates: tuple[Candidate, ...]


class Prediction(NamedTuple):
    """The prediction for a measured run."""

    run: MeasuredRun
    predicted: float
    estimate: Estimate

    @property
    def error(self) -> float:
        """Relative error against the nearest value that rounds to the measured one."""
        low, high = self.run.measured - self.run.rounding, self.run.measured + self.run.rounding
        return self.predicted / min(max(self.predicted, low), high) - 1


class Errors(NamedTuple):
    """Mean and largest absolute error of some predictions."""

    mean: float
    worst: float


def predict(run: MeasuredRun, change: Callable[[Candidate], Candidate] | None = None) -> Prediction:
    """Predict the measured quantity of a run; `change` returns a candidate with other constants."""
    candidates = run.candidates if change is None else map(change, run.candidates)
    estimates = [Estimate(candidate, (), step_time(candidate)) for candidate in candidates]
    fastest = min(
        estimates,
        key=lambda estimated: estimated.time.seconds / estimated.candidate.config.data.global_batch,
    )
    return Prediction(run, QUANTITIES[run.quantity](fastest), fastest)


def errors(predictions: Sequence[Prediction]) -> Errors:
    """Return the errors of some predictions."""
    absolute = [abs(prediction.error) for prediction in predictions]
    return Errors(sum(absolute) / len(absolute), max(absolute))
