"""Callbacks that measure a few steps: against the plan, with and without compiler, in a trace."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.planner.candidate import Candidate, StageKinds
from frontier_llm.planner.memory import STATES, StageMemory, stage_memory
from frontier_llm.planner.step_time import StepTime, step_time
from frontier_llm.planner.timeline import action_times
from frontier_llm.telemetry.step_timeline import RECORDED_ACTIONS, PassTimeline, StepTimeline
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

    The comparison is made once per run, when the timer of the step phases has measured enough
    steps; with `plan=off` never. Only rank 0 has this callback. Runs no collectives.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._pending = context.config.plan != "off"
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
    """Compare each kind of state, the peak, and on a GPU what a step allocates and frees again."""
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
    for phase, names in PHASES.items():
        predicted = None if planned is None else sum(planned.parts[name] for name in names)
        yield PlanRow(name=phase, unit="seconds", predicted=predicted, measured=measured[phase])
    all_names = [name for names in PHASES.values() for name in names]
    predicted = None if planned is None else sum(planned.parts[name] for name in all_names)
    yield PlanRow(name="step", unit="seconds", predicted=predicted, measured=sum(measured.values()))


class PipelineTimeline(Callback):
    """Writes timeline.json: the actions of the stages in one step, measured and planned.

    It also logs the bubble. In the step with the measurement, `on_step_end` is collective over all
    ranks: one all-reduce of some hundred numbers per stage. Rank 0 writes the file.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._pending = True
        self._schedule = context.model.layout.schedule

    def on_replacement(self, last_step: int) -> None:
        """Keep the timeline of the first steps of the run."""
        self._pending = False

    def on_step_end(self, end: StepEnd) -> None:
        """Collect the measured times once they are known; do nothing without a pipeline."""
        if not self._pending or not self.context.train_step.timer.passes.seconds:
            return
        self._pending = False
        measured = self._measured()
        if self.context.world.rank != 0:
            return
        timeline = StepTimeline(
            step=end.metrics.step, measured=measured, planned=_planned(self.context)
        )
        text = f"stages waited {measured.waiting_share:.1%} of the passes of a step"
        if timeline.planned is not None:
            text += f" (planned {timeline.planned.waiting_share:.1%})"
        _LOG.debug("%-10s %s", "pipeline", text)
        try:
            timeline.write(Path(self.context.config.run.dir))
        except TrainingError as error:  # the run can do without the picture
            _LOG.warning("%s", error)

    def _measured(self) -> PassTimeline:
        """Return what the first replica has measured. Collective over all ranks."""
        groups, times = self.context.groups, self.context.train_step.timer.passes.seconds
        # by stage: the seconds of all actions, the end of the last one, and starts and ends
        rows = torch.zeros(
            groups.grid.pipeline,
            2 * (1 + RECORDED_ACTIONS),
            dtype=torch.float64,
            device=self.context.hardware.accelerator.device,
        )
        at = groups.coordinates
        if at.data == 0 and at.tensor == 0:
            busy = sum(end - start for start, end in times)
            row = [busy, times[-1][1], *chain(*times[:RECORDED_ACTIONS])]
            rows[at.pipeline, : len(row)] = torch.tensor(row, dtype=rows.dtype)
        dist.all_reduce(rows)
        by_stage = rows.tolist()
        return PassTimeline.of(
            self._schedule,
            times=[list(zip(row[2::2], row[3::2], strict=True)) for row in by_stage],
            busy=[row[0] for row in by_stage],
            ends=[row[1] for row in by_stage],
        )


def _planned(context: TrainerContext) -> PassTimeline | None:
    """Simulate the same step; return None with `plan=off` and if the device's speed is unknown."""
    layout = context.model.layout
    if context.config.plan == "off":
        return None
    candidate = Candidate(context.config, layout, StageKinds(layout))
    time = predict_time(candidate)
    if time is None:
        return None
    seconds = candidate.stages.of_stages(time.actions)
    times = action_times(layout.schedule, seconds, time.send)
    return PassTimeline.of(
        layout.schedule,
        times,
        busy=[sum(end - start for start, end in stage_times) for stage_times in times],
        ends=[stage_times[-1][1] for stage_times in times],
    )


TRIAL_STEPS = 3
"""Number of steps with compiled functions, and of steps without. The first step of each kind is not
measured. In the first step of the run the functions are compiled; the watchdog allows more time for
it."""


class KernelTrial(Callback):
    """Decides in the first steps whether compiled functions are faster than uncompiled ones.

    The gain of torch.compile depends on the model, the device and the version of torch. With
    `kernels=fastest` functions of the layers run compiled in the first steps, then uncompiled for
    as many steps, and the run continues with the faster ones. Both compute the same numbers up to
    rounding. Collective over all ranks, which use the times of rank 0, because they must make the
    same decision.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._is_on = context.hardware.kernels.on_trial
        self._device = context.hardware.accelerator.device
        self._seconds: list[float] = []
        if self._is_on:
            # a function that cannot be compiled here runs uncompiled, and torch logs why with
            # pages of traceback: those of one rank are enough
            torch._dynamo.config.suppress_errors = True
            if context.world.rank:
                logging.getLogger("torch._dynamo").setLevel(logging.ERROR)

    def on_step_begin(self, step: int) -> None:
        """Run uncompiled functions from the fourth step on."""
        if self._is_on and len(self._seconds) == TRIAL_STEPS:
            torch.compiler.set_stance("force_eager")

    def on_step_end(self, end: StepEnd) -> None:
        """Record the time of the step; after the sixth step, decide."""
        if not self._is_on:
            return
        self._seconds.append(end.metrics.step_seconds)
        if len(self._seconds) == 2 * TRIAL_STEPS:
            self._is_on = False
            compiled, uncompiled = self._times_of_rank_0()
            torch.compiler.set_stance("default" if compiled < uncompiled else "force_eager")
            if self.context.world.rank == 0:
                _LOG.info(
                    "%-10s a step with compiled functions takes %.2f of the time, so they are %s",
                    "kernels",
                    compiled / uncompiled,
                    "used" if compiled < uncompiled else "not used",
                )

    def close(self) -> None:
        """Let torch.compile work as usual in what this process does next."""
        if self.context.hardware.kernels.on_trial:
            torch.compiler.set_stance("default")
            torch._dynamo.config.suppress_errors = False

    def _times_of_rank_0(self) -> list[float]:
        """Return the seconds of the fastest step with compiled functions, and without."""
        measured = self._seconds[1:TRIAL_STEPS], self._seconds[TRIAL_STEPS + 1 :]
        times = torch.tensor([min(times) for times in measured], dtype=torch.float64)
        times = times.to(self._device)
        dist.broadcast(times, src=0)
        return list(times.tolist())


TRACES = "traces"
"""Folder of the traces in the run directory."""


class Tracer(Callback):
    """Traces steps with torch's profiler: what ran on the host and on the device, and when.

    `telemetry.trace_steps` steps are traced, from step `telemetry.trace_from_step` on. Only the
    first rank of each pipeline stage is traced, because the other ranks of the stage do the same
    work. The files can be opened in Perfetto (ui.perfetto.dev) and chrome://tracing.

    The end of a trace is collective over all ranks, which wait for messages that are being sent.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        telemetry, groups = context.config.telemetry, context.groups
        first, count = telemetry.trace_from_step, telemetry.trace_steps
        self._steps = range(0) if first is None else range(first, first + count)
        self._is_traced = groups.coordinates.tensor == 0 and groups.coordinates.data == 0
        self._traced: list[int] = []
        self._profile: profile | None = None
        self._region: record_function | None = None
        self._writer: Thread | None = None

    def on_step_begin(self, step: int) -> None:
        """End the region of the previous step, with its checkpoint, and begin that of this step."""
        self._end_region()
        if step not in self._steps:
            self._end_trace()
            return
        if self._is_traced and self._profile is None:
            self._profile = profile()  # records all that this build of torch supports
            self._profile.start()
        self._traced.append(step)
        self._region = record_function(f"step {step}")
        self._region.__enter__()

    def on_stop(self, *, is_early: bool) -> None:
        """End a trace that is not complete, and wait until it is written."""
        self._end_region()
        self._end_trace()
        if self._writer is not None:
            self._writer.join()

    def _end_region(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.__exit__(None, None, None)

    def _end_trace(self) -> None:
        """Stop the profiler, and write the trace in a thread, so that other ranks need not wait.

        Before, this rank waits for messages that are being sent, because gloo keeps their names in
        memory that belongs to the profiler.
        """
        if not self._traced:
            return
        steps, self._traced = self._traced, []
        self.context.states.reads.drain()
        finished, self._profile = self._profile, None
        if finished is None:
            return
        finished.stop()
        name = f"steps_{steps[0]}_to_{steps[-1]}_rank_{self.context.world.rank}.json.gz"
        file = Path(self.context.config.run.dir) / TRACES / name
        self._writer = Thread(target=_write, args=(finished, file), name="trace", daemon=True)
        self._writer.start()


def _write(finished: profile, file: Path) -> None:
    """Write a trace; a failure is logged and does not stop the run."""
    try:
        file.parent.mkdir(exist_ok=True)
        finished.export_chrome_trace(str(file))
    except OSError as error:
        _LOG.warning("no trace: %s", error)
    else:
        _LOG.info("trace      %s (open it at ui.perfetto.dev)", file)
