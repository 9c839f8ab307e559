"""Writes timeline.json: the actions of the pipeline's stages in one step, measured and planned."""

import logging
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from frontier_llm.planner.candidate import Candidate, StageKinds
from frontier_llm.planner.timeline import action_times
from frontier_llm.telemetry.step_timeline import (
    RECORDED_ACTIONS,
    TIMELINE_FILE,
    PassTimeline,
    StepTimeline,
)
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.callbacks.plan_check import predict_time
from frontier_llm.trainer.context import TrainerContext

_LOG = logging.getLogger(__name__)


class PipelineTimeline(Callback):
    """Writes timeline.json and logs the bubble, when a step with a pipeline has been measured.

    In this step `on_step_end` is collective over all ranks: one all-reduce of some hundred numbers
    per stage. Rank 0 writes the file.
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
        _LOG.debug("%-10s %s", "pipeline", describe(timeline))
        try:
            timeline.write(Path(self.context.config.run.dir))
        except OSError as error:  # the run can do without the picture
            _LOG.warning("%s cannot be written: %s", TIMELINE_FILE, error.strerror)

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


def describe(timeline: StepTimeline) -> str:
    """Return the measured and the planned bubble as text."""
    text = f"stages waited {timeline.measured.waiting_share:.1%} of the passes of a step"
    planned = timeline.planned
    return text if planned is None else f"{text} (planned {planned.waiting_share:.1%})"


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
