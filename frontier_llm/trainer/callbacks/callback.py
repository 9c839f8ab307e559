"""The base class of callbacks. A callback has one method for each moment of a run.

A run reaches the moments in this order:

on_start, or on_replacement
for each step:
    on_step_begin
    on_update
    on_checkpoint_committed       if all ranks know of a commit (it may also come later, see below)
    on_evaluation                 if the step is followed by a validation
    on_step_end
    on_rewind                     if a callback has asked for a rewind
    on_checkpoint_begin           otherwise, if a checkpoint is due
on_stop
on_error                          if the run fails; then the moments before it do not follow
close

A rewind is a return to an earlier checkpoint.
"""

from dataclasses import dataclass, field

from frontier_llm.saving.checkpoints import CommittedCheckpoint
from frontier_llm.saving.restorer import Resumed
from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.telemetry.summary import PlanRow
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.step_result import StepResult


@dataclass
class StepEnd:
    """A finished step. A callback may change the fields, and later callbacks see the changes."""

    result: StepResult
    """Numbers that are the same on all ranks."""
    metrics: StepMetrics
    """The numbers that are recorded. Those that measure time are measured on this rank."""
    plan: list[PlanRow] = field(default_factory=list)
    """Comparison of the planner's prediction with measurements. It is made after one step, on rank
    0; otherwise the list is empty."""
    rewind_reason: str = ""
    """Why the run must go back to the checkpoint before this step; empty if the run continues. A
    callback that sets this field must set it on all ranks."""


@dataclass(frozen=True)
class Rewind:
    """A return to an earlier checkpoint."""

    from_step: int
    """The step after which the run went back."""
    loss: float
    """Training loss of that step, in nats per token."""
    reason: str


class Callback:
    """Base class of callbacks: every method does nothing unless a subclass overrides it.

    Every rank makes its own instance and calls it on its main thread. All methods except `on_error`
    and `close` are called at the same point of the run on all ranks. In these methods a callback
    may run collectives, provided that it runs the same collectives on all ranks.

    A callback may read but not change the context. When it is made, the states are not loaded yet.
    """

    def __init__(self, context: TrainerContext) -> None:
        self.context = context

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Run after the states are loaded and before the first step.

        The loss is that of the untrained or resumed model, in nats per token. `resumed` is the
        checkpoint that the run continues from; None for a new run.
        """

    def on_replacement(self, last_step: int) -> None:
        """Run instead of `on_start` if ranks were replaced, and training continues from memory.

        Every rank has made new callbacks. A callback that keeps numbers over several steps must
        start again. `last_step` was ended on all ranks. Records of a later step are made again:
        `on_update`, `on_evaluation` and `on_step_end` may be called a second time for it.
        """

    def on_step_begin(self, step: int) -> None:
        """Run before step number `step`, counted from 1, reads its samples."""

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Run when the update of a step is done or was skipped, before its validation."""

    def on_evaluation(self, step: int, validation_loss: float) -> None:
        """Run after the validation that follows a step; its loss is in nats per token."""

    def on_step_end(self, end: StepEnd) -> None:
        """Run when all numbers of a step are known, before its checkpoint begins."""

    def on_checkpoint_begin(self, step: int) -> None:
        """Run before the run starts to write a checkpoint of `step` in the run directory."""

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Run when all ranks know that a checkpoint in the run directory is committed.

        This happens in the next step after the commit, before the next checkpoint begins, or at the
        end of the run, whichever is first. `checkpoint.keep` deletes it only after this has
        returned on rank 0.
        """

    def on_rewind(self, rewind: Rewind) -> None:
        """Run when the states of an earlier checkpoint are loaded after a rewind."""

    def on_stop(self, *, is_early: bool) -> None:
        """Run after the last step, when the last checkpoint is committed.

        `is_early`: the run was asked to stop before its last step.
        """

    def on_error(self, error: BaseException) -> None:
        """Run when the run ends with an error. No collectives are allowed: a rank may be gone."""

    def close(self) -> None:
        """Release files and threads at the end of every run. No collectives are allowed."""
