"""Define timeline.json: when each stage of a pipeline computed the actions of one step.

trainer/callbacks/measurements.py writes the file, and the report draws it.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from frontier_llm.geometry.pipeline_schedule import Action, Event, Kind, Schedule
from frontier_llm.telemetry.summary import Part, RunFile

TIMELINE_FILE = "timeline.json"
RECORDED_ACTIONS = 240
"""Number of actions of each stage in the file, at most; a picture could not show more. In a longer
step, they are the first ones."""


_Number = Annotated[int, Field(ge=0, lt=1 << 31)]
_Seconds = Annotated[float, Field(ge=-1e12, le=1e12)]


class TimedAction(Part):
    """One action of one stage."""

    stage: _Number
    kind: Kind
    virtual_stage: _Number
    """Index of the model chunk on its stage."""
    micro_batch: _Number
    """Number of the micro-batch in the step, counted from 0."""
    start_seconds: _Seconds
    """Seconds from the beginning of the step to the start of the action."""
    end_seconds: _Seconds
    """Seconds from the beginning of the step to the end of the action."""

    @property
    def event(self) -> Event:
        """The action, to be drawn."""
        action = Action(self.kind, self.virtual_stage, self.micro_batch)
        return Event(self.stage, action, self.start_seconds, self.end_seconds)


class PassTimeline(Part):
    """The forward and backward passes of one step on all stages."""

    seconds: _Seconds
    """Seconds from the beginning of the step to the end of the last action."""
    waiting_share: Annotated[float, Field(ge=-1e6, le=1e6)]
    """Share of these seconds in which a stage waited for other stages (the pipeline's bubble), as
    the mean over the stages."""
    actions: list[TimedAction] = Field(min_length=1, max_length=1 << 19)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        times: Sequence[Sequence[tuple[float, float]]],
        busy: Sequence[float],
        ends: Sequence[float],
    ) -> "PassTimeline":
        """Make a timeline from the start and end of each stage's actions.

        Those after the first `RECORDED_ACTIONS` are ignored and may be left out.
        """
        actions = [
            TimedAction(stage=stage, **action._asdict(), start_seconds=start, end_seconds=end)
            for stage, stage_times in enumerate(times)
            for action, (start, end) in zip(
                schedule.actions[stage][:RECORDED_ACTIONS], stage_times, strict=False
            )
        ]
        seconds = max(ends)
        waiting_share = 1 - sum(busy) / (len(busy) * seconds)
        return cls(seconds=seconds, waiting_share=waiting_share, actions=actions)


class StepTimeline(RunFile):
    """The passes of one step as they were planned and measured."""

    file_name: ClassVar[str] = TIMELINE_FILE

    step: Annotated[int, Field(ge=0, le=10**15)]
    measured: PassTimeline
    """Times that the ranks of one replica measured, of each stage the first tensor rank."""
    planned: PassTimeline | None
    """The same actions as the planner simulates them; None if it cannot predict times."""

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(action.stage for action in self.measured.actions)
