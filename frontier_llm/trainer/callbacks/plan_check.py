"""Compares the planner's prediction with measurements of the first steps, once per run."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, StageKinds
from frontier_llm.planner.memory import STATES, StageMemory, stage_memory
from frontier_llm.planner.step_time import StepTime, step_time
from frontier_llm.telemetry.summary import PlanRow
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.units import format_bytes, format_seconds

_LOG = logging.getLogger(__name__)
TOLERANCE = 0.1
"""If the peak memory exceeds its prediction by more than this fraction, a warning is logged."""
PHASES = {
    "passes": (
        "compute",
        "tensor",
        "host",
        "exchange",
        "bubble",
        "gather_params",
        "reduce_grads",
        "refresh_params",
    ),
    "reductions": ("reduce_states",),
    "update": ("update",),
}
"""For each measured phase of a step, the parts of the predicted step time that it contains
(planner/step_time.py)."""


class PlanCheck(Callback):
    """Compares memory and step time of rank 0 with the plan, after the first few steps.

    The comparison is made when the timer of the step phases has measured enough steps. Other ranks
    do nothing, and with `plan=off` rank 0 does nothing either. Runs no collectives.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._pending = context.world.rank == 0 and context.config.plan != "off"
        if self._pending:
            layout = context.model.layout
            candidate = Candidate(context.config, layout, StageKinds(layout))
            self._memory = stage_memory(candidate, context.groups.coordinates.pipeline)
            is_measured = context.config.cluster.device.calibration.is_measured
            self._time = predict_time(candidate) if is_measured else None

    def on_replacement(self, last_step: int) -> None:
        """Compare nothing: the first steps of the run have been compared."""
        self._pending = False

    def on_step_end(self, end: StepEnd) -> None:
        """Make the comparison when the timer is complete: log it, and add it to the metrics."""
        if not self._pending or not self.context.train_step.timer.is_complete:
            return
        self._pending = False
        rows = [
            *_memory_rows(self.context, self._memory),
            *_time_rows(self.context.train_step.timer.typical(), self._time),
        ]
        for line in describe_rows(rows):
            _LOG.debug("%-10s %s", "plan", line)
        self._warn(rows)
        end.plan = rows
        end.metrics = replace(end.metrics, plan=values_of(rows))

    def _warn(self, rows: list[PlanRow]) -> None:
        """Warn if the peak memory of the device is larger than planned."""
        peak = next((row for row in rows if row.name == "peak of the device"), None)
        if peak is None or peak.predicted is None:
            return
        if peak.measured > (1 + TOLERANCE) * peak.predicted:
            _LOG.warning(
                "the peak memory of the device is %s, %s were planned; the largest term is %s",
                format_bytes(peak.measured),
                format_bytes(peak.predicted),
                self._memory.largest,
            )


def values_of(rows: list[PlanRow]) -> dict[str, dict[str, float | None]] | None:
    """Return the comparison as plain values by name; None if there are no rows."""
    return {r.name: {"predicted": r.predicted, "measured": r.measured} for r in rows} or None


def describe_rows(rows: list[PlanRow]) -> Iterator[str]:
    """Yield two lines of text: the comparison of memory, and the comparison of times."""
    for unit, to_text in (("bytes", format_bytes), ("seconds", format_seconds)):
        of_unit = [row for row in rows if row.unit == unit]
        uncalibrated = unit == "seconds" and all(row.predicted is None for row in of_unit)
        advice = ["not calibrated: frontier-llm calibrate"] if uncalibrated and of_unit else []
        yield ", ".join([*(_describe(row, to_text) for row in of_unit), *advice])


def _describe(row: PlanRow, to_text: Callable[[float], str]) -> str:
    if row.predicted is None:
        return f"{row.name} {to_text(row.measured)}"
    if row.predicted == row.measured:
        return f"{row.name} {to_text(row.measured)} as planned"
    return f"{row.name} {to_text(row.measured)} (planned {to_text(row.predicted)})"


def predict_time(candidate: Candidate) -> StepTime | None:
    """Return the predicted step time; None if the planner cannot predict it."""
    try:
        return step_time(candidate)
    except ConfigError:  # the cluster file has no speed of this device in this precision
        return None


def _memory_rows(context: TrainerContext, planned: StageMemory) -> Iterator[PlanRow]:
    """Compare the memory of each kind of state, and the peak.

    On a GPU there is also the difference of the two: memory that a step allocates and frees again.
    """
    state_bytes = context.states.memory_bytes()
    for name in STATES:
        yield PlanRow(
            name=name, unit="bytes", predicted=planned.by_category[name], measured=state_bytes[name]
        )
    accelerator = context.hardware.accelerator
    peak = accelerator.peak_bytes()
    if accelerator.is_cpu:
        is_measured = context.config.cluster.device.calibration.is_measured
        total = planned.total if is_measured else None
        yield PlanRow(name="process", unit="bytes", predicted=total, measured=peak)
        return
    # the measured peak does not contain memory that is allocated outside torch's allocator
    outside = ("reserved", "communicators", "slack")
    allocated = planned.total - sum(planned.by_category[name] for name in outside)
    states = sum(state_bytes[name] for name in STATES)
    yield PlanRow(
        name="allocated within a step",
        unit="bytes",
        predicted=allocated - sum(planned.by_category[name] for name in STATES),
        measured=peak - states,
    )
    yield PlanRow(name="peak of the device", unit="bytes", predicted=allocated, measured=peak)
    reserved = accelerator.allocator_bytes()["reserved"]
    slack = planned.by_category["slack"]  # the planner's allowance for fragmentation
    yield PlanRow(
        name="peak with fragmentation", unit="bytes", predicted=allocated + slack, measured=reserved
    )


def _time_rows(measured: dict[str, float], planned: StepTime | None) -> Iterator[PlanRow]:
    """Compare the seconds of each phase of a step and of the whole step."""
    for phase, names in PHASES.items():
        predicted = None if planned is None else sum(planned.parts[name] for name in names)
        yield PlanRow(name=phase, unit="seconds", predicted=predicted, measured=measured[phase])
    all_names = [name for names in PHASES.values() for name in names]
    predicted = None if planned is None else sum(planned.parts[name] for name in all_names)
    yield PlanRow(name="step", unit="seconds", predicted=predicted, measured=sum(measured.values()))
