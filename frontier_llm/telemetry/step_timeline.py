"""Define timeline.json: when each stage of a pipeline computed the actions of one step.

trainer/callbacks/pipeline_timeline.py writes the file, and the report draws it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.geometry.pipeline_schedule import Action, Event, Kind, Schedule

TIMELINE_FILE = "timeline.json"
RECORDED_ACTIONS = 240
"""Number of actions of each stage in the file, at most; a picture could not show more. In a longer
step, they are the first ones."""


class _Part(BaseModel):
    """Base of the classes below. Unknown keys are ignored: files of other versions can be read."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False
    )


_Number = Annotated[int, Field(ge=0, lt=1 << 31)]
_Seconds = Annotated[float, Field(ge=-1e12, le=1e12)]


class TimedAction(_Part):
    """One action of one stage."""

    stage: _Number
    """Position of the stage on the pipeline axis."""
    kind: Kind
    """What the action computes."""
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


class PassTimeline(_Part):
    """The forward and backward passes of one step on all stages."""

    seconds: _Seconds
    """Seconds from the beginning of the step to the end of the last action."""
    waiting_share: Annotated[float, Field(ge=-1e6, le=1e6)]
    """Share of these seconds in which a stage waited for other stages (the pipeline's bubble), as
    the mean over the stages."""
    actions: list[TimedAction] = Field(min_length=1, max_length=1 << 19)
    """By stage, the first actions in their order."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        times: Sequence[Sequence[tuple[float, float]]],
        busy: Sequence[float],
        ends: Sequence[float],
    ) -> "PassTimeline":
        """Make a timeline.

        Args:
            schedule: the actions of all stages.
            times: for each stage, start and end of its actions; those after the first
                `RECORDED_ACTIONS` are ignored and may be left out.
            busy: for each stage, the seconds of all its actions.
            ends: for each stage, the end of its last action.
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


class StepTimeline(_Part):
    """The passes of one step as they were planned and measured."""

    step: Annotated[int, Field(ge=0, le=10**15)]
    """Number of the measured step."""
    measured: PassTimeline
    """Times that the ranks of one replica measured, of each stage the first tensor rank."""
    planned: PassTimeline | None
    """The same actions as the planner simulates them; None if it cannot predict times."""

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(action.stage for action in self.measured.actions)

    def write(self, run_dir: Path) -> None:
        """Write timeline.json, replacing an earlier file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        path = run_dir / TIMELINE_FILE
        partial = path.with_suffix(".json.partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, run_dir: Path) -> "StepTimeline | None":
        """Read the timeline of a run; return None if the file is absent or damaged."""
        try:
            path = run_dir / TIMELINE_FILE
            return cls.model_validate_json(path.read_bytes() if path.is_file() else b"")
        except (OSError, ValidationError):
            return None
