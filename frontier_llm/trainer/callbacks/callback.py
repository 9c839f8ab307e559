"""The moments of a run at which callbacks act, in the order in which a run reaches them.

on_start
for each step:
    on_step_begin
    on_update
    on_checkpoint_committed       if all ranks have learnt of a commit (or later: see its docstring)
    on_evaluation                 if the step is followed by a validation
    on_step_end
    on_rewind                     if a callback asked for a rewind
    on_checkpoint_begin           else, if a checkpoint is due
on_stop
on_error                          instead of all moments that remain, if the run fails
close
"""

from dataclasses import dataclass, field

from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.telemetry.summary import PlanRow
from frontier_llm.trainer.checkpoints import CommittedCheckpoint
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step import StepResult


@dataclass
class StepEnd:
    """A finished step, as callbacks receive it. Later callbacks see changes of earlier ones."""

    result: StepResult
    """Numbers that are the same on all ranks."""
    metrics: StepMetrics
    """The record of the step. Times and the checkpoint stall are those of this rank."""
    plan: list[PlanRow] = field(default_factory=list)
    """The comparison of plan and run; empty on other ranks than 0, and on all steps but one."""
    rewind_reason: str = ""
    """Why the run must go back to the checkpoint before this step; empty = it continues. A callback
    that sets it must do so on all ranks."""


@dataclass(frozen=True)
class Rewind:
    """A return to an earlier checkpoint."""

    from_step: int
    """The step after which the run went back."""
    loss: float
    """Training loss of that step, in nats per token."""
    reason: str
    """Why the run went back."""


class Callback:
    """Base class of callbacks: every moment does nothing unless a subclass overrides it.

    Every rank makes its own instance and calls it on its main thread. All moments except
    `on_error` and `close` come at the same point of the run on all ranks, so a callback may run
    collectives in them, if it runs the same ones on all ranks.
    """

    def __init__(self, context: TrainerContext) -> None:
        """Keep the context; the states are not loaded yet.

        Args:
            context: the objects of this rank. Read them; do not change them.
        """
        self.context = context

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Run after the states are loaded and before the first step.

        Args:
            validation_loss: of the model as it is now, in nats per token.
            resumed: the checkpoint that the run continues from; None for a new run.
        """

    def on_step_begin(self, step: int) -> None:
        """Run before a step reads its samples. Steps are counted from 1."""

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Run when the update of a step is done or was skipped, before its validation.

        Args:
            step: number of the step.
            first_sample: number of the first sample of the step.
            result: numbers of the step.
        """

    def on_evaluation(self, step: int, validation_loss: float) -> None:
        """Run after a validation; the loss is in nats per token."""

    def on_step_end(self, end: StepEnd) -> None:
        """Run when all numbers of a step are known, before its checkpoint begins."""

    def on_checkpoint_begin(self, step: int) -> None:
        """Run before a checkpoint of `step` in the run directory begins to be written."""

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Run when all ranks know that a checkpoint in the run directory is committed.

        Comes at the next step after the commit, before the next checkpoint begins, or at the end
        of the run, whichever is first.
        """

    def on_rewind(self, rewind: Rewind) -> None:
        """Run when the states of an earlier checkpoint are loaded after a rewind."""

    def on_stop(self, *, is_early: bool) -> None:
        """Run when no step follows and the last checkpoint is committed.

        Args:
            is_early: whether the run was asked to stop before its last step.
        """

    def on_error(self, error: BaseException) -> None:
        """Run when the run ends with an error. Not collective: other ranks may be gone."""

    def close(self) -> None:
        """Release files and threads at the end of every run. Not collective, as `on_error`."""
