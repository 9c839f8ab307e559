"""What was planned of a run, beside what it does: compared once, after a few steps."""

import logging
from collections.abc import Callable, Iterator

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, Model
from frontier_llm.planner.memory import STATES, StageMemory, stage_memory
from frontier_llm.planner.step_time import StepTime, step_time
from frontier_llm.telemetry.summary import PlanRow
from frontier_llm.trainer.parts import Parts
from frontier_llm.units import format_bytes, format_seconds

_LOG = logging.getLogger(__name__)
TOLERANCE = 0.1
"""What a peak may exceed its prediction by before that is a warning."""
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
"""Phases of a step that can be measured, and the parts of a prediction that fall into them."""


class Planned:
    """The prediction for the rank that asks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        candidate = _candidate(parts)
        self._memory = stage_memory(candidate, parts.groups.at.pipeline)
        self._time = _time(candidate)

    def compare(self) -> list[PlanRow]:
        """Put what the rank has measured beside the prediction."""
        return [*_memory_rows(self._parts, self._memory), *_time_rows(self._parts, self._time)]

    def warn(self, rows: list[PlanRow]) -> None:
        """Say it where the device holds more than was planned."""
        peak = next((row for row in rows if row.name == "peak of the device"), None)
        if peak is None or peak.predicted is None:
            return
        if peak.measured > (1 + TOLERANCE) * peak.predicted:
            _LOG.warning(
                "the device has held %s, %s were planned; the largest term is %s",
                format_bytes(peak.measured),
                format_bytes(peak.predicted),
                self._memory.largest,
            )


def values_of(rows: list[PlanRow]) -> dict[str, dict[str, float | None]] | None:
    """Return the comparison as plain values; None = there is none."""
    return {r.name: {"predicted": r.predicted, "measured": r.measured} for r in rows} or None


def words_of(rows: list[PlanRow]) -> Iterator[str]:
    """Yield the comparison as lines for people."""
    for unit, write in (("bytes", format_bytes), ("seconds", format_seconds)):
        of_unit = [row for row in rows if row.unit == unit]
        yield ", ".join(_words(row, write) for row in of_unit)


def _words(row: PlanRow, write: Callable[[float], str]) -> str:
    if row.predicted is None:
        return f"{row.name} {write(row.measured)}"
    if row.predicted == row.measured:
        return f"{row.name} {write(row.measured)} as planned"
    return f"{row.name} {write(row.measured)} (planned {write(row.predicted)})"


def _candidate(parts: Parts) -> Candidate:
    """Lay the run out as it really is: with the precision that was chosen."""
    config: RunConfig = parts.config
    precision = config.precision.model_copy(update={"name": parts.choices.precision})
    config = config.model_copy(update={"precision": precision})
    return Candidate(Model(config), parts.groups.grid, parts.states.factors)


def _time(candidate: Candidate) -> StepTime | None:
    try:
        return step_time(candidate)
    except ConfigError:  # the cluster file does not know this device's speed in this format
        return None


def _memory_rows(parts: Parts, planned: StageMemory) -> Iterator[PlanRow]:
    held = parts.states.memory_bytes()
    for name in STATES:
        yield PlanRow(
            name=name, unit="bytes", predicted=planned.by_category[name], measured=held[name]
        )
    peak = parts.accelerator.peak_bytes()
    if parts.accelerator.is_cpu:
        yield PlanRow(name="process", unit="bytes", predicted=planned.total, measured=peak)
        return
    # what the runtime takes beside torch's allocator is not in torch's count
    asked = planned.total - planned.by_category["reserved"] - planned.by_category["slack"]
    states = sum(held[name] for name in STATES)
    yield PlanRow(
        name="what comes and goes",
        unit="bytes",
        predicted=asked - sum(planned.by_category[name] for name in STATES),
        measured=peak - states,
    )
    yield PlanRow(name="peak of the device", unit="bytes", predicted=asked, measured=peak)


def _time_rows(parts: Parts, planned: StepTime | None) -> Iterator[PlanRow]:
    measured = parts.step.timer.typical()
    for phase, names in PHASES.items():
        predicted = None if planned is None else sum(planned.parts[name] for name in names)
        yield PlanRow(name=phase, unit="seconds", predicted=predicted, measured=measured[phase])
    whole = None if planned is None else sum(planned.parts[n] for p in PHASES.values() for n in p)
    yield PlanRow(name="step", unit="seconds", predicted=whole, measured=sum(measured.values()))
