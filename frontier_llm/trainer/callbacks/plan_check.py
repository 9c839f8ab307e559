"""The planner's prediction compared with measurements of the first steps, once per run."""

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
"""Share by which the peak may exceed its prediction before a warning is logged."""
PHASES = {
    "passes": (
        "compute",
        "tensor",
        "exchange",
        "bubble",
        "gather_params",
        "reduce_grads",
        "refresh_params",
    ),
    "reductions": ("reduce_states",),
    "update": ("update",),
}
"""Measured phases of a step, and the parts of the predicted step time that each contains."""


class PlanCheck(Callback):
    """Compares memory and step time of rank 0 with the plan, when the step timer is complete.

    Works on rank 0 and unless `plan=off`. No collectives.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._pending = context.world.rank == 0 and context.config.plan != "off"
        if self._pending:
            layout = context.model.layout
            candidate = Candidate(context.config, layout, StageKinds(layout))
            self._memory = stage_memory(candidate, context.groups.at.pipeline)
            self._time = _time(candidate)

    def on_step_end(self, end: StepEnd) -> None:
        """Add the comparison to the step after which the timer is complete, and log it."""
        if not self._pending or not self.context.train_step.timer.is_complete:
            return
        self._pending = False
        rows = [
            *_memory_rows(self.context, self._memory),
            *_time_rows(self.context.train_step.timer.typical(), self._time),
        ]
        for line in describe_rows(rows):
            _LOG.info("%-10s %s", "plan", line)
        self._warn(rows)
        end.plan = rows
        end.metrics = replace(end.metrics, plan=values_of(rows))

    def _warn(self, rows: list[PlanRow]) -> None:
        """Warn if the device has held more memory than planned."""
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
    """Yield the comparison as two lines of text: memory, then time."""
    for unit, write in (("bytes", format_bytes), ("seconds", format_seconds)):
        of_unit = [row for row in rows if row.unit == unit]
        yield ", ".join(_describe(row, write) for row in of_unit)


def _describe(row: PlanRow, write: Callable[[float], str]) -> str:
    if row.predicted is None:
        return f"{row.name} {write(row.measured)}"
    if row.predicted == row.measured:
        return f"{row.name} {write(row.measured)} as planned"
    return f"{row.name} {write(row.measured)} (planned {write(row.predicted)})"


def _time(candidate: Candidate) -> StepTime | None:
    try:
        return step_time(candidate)
    except ConfigError:  # the cluster file has no speed of this device in this precision
        return None


def _memory_rows(context: TrainerContext, planned: StageMemory) -> Iterator[PlanRow]:
    held = context.states.memory_bytes()
    for name in STATES:
        yield PlanRow(
            name=name, unit="bytes", predicted=planned.by_category[name], measured=held[name]
        )
    accelerator = context.hardware.accelerator
    peak = accelerator.peak_bytes()
    if accelerator.is_cpu:
        yield PlanRow(name="process", unit="bytes", predicted=planned.total, measured=peak)
        return
    # torch's peak does not count memory that the runtime takes outside torch's allocator
    allocated = planned.total - planned.by_category["reserved"] - planned.by_category["slack"]
    states = sum(held[name] for name in STATES)
    yield PlanRow(
        name="what comes and goes",
        unit="bytes",
        predicted=allocated - sum(planned.by_category[name] for name in STATES),
        measured=peak - states,
    )
    yield PlanRow(name="peak of the device", unit="bytes", predicted=allocated, measured=peak)


def _time_rows(measured: dict[str, float], planned: StepTime | None) -> Iterator[PlanRow]:
    for phase, names in PHASES.items():
        predicted = None if planned is None else sum(planned.parts[name] for name in names)
        yield PlanRow(name=phase, unit="seconds", predicted=predicted, measured=measured[phase])
    whole = None if planned is None else sum(planned.parts[n] for p in PHASES.values() for n in p)
    yield PlanRow(name="step", unit="seconds", predicted=whole, measured=sum(measured.values()))
