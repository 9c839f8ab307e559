"""Writes ledger.jsonl: the samples of each step, and events such as resumes and rewinds."""

from pathlib import Path

from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.ledger_file import LedgerFile
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step_result import StepResult


class Ledger(Callback):
    """Writes the ledger on rank 0. Runs no collectives."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._file = LedgerFile(Path(context.config.run.dir))
        self._is_writer = context.world.rank == 0
        self._recorded_step: int | None = None
        """A step that was recorded before ranks were replaced."""

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Record a resume, and what decides which samples are read."""
        if not self._is_writer:
            return
        step = self.context.progress.step
        if resumed is not None:
            self._file.event("resume", step, changes=resumed.changes)
        for event, segments in self.context.data.to_meta().items():
            if segments:
                self._file.event(event, step, segments=segments)

    def on_replacement(self, last_step: int) -> None:
        """Record that ranks were replaced, and remember the step that the ledger ends with."""
        if self._is_writer:
            self._recorded_step = self._file.last_step()
            self._file.event("replacement", self.context.progress.step)

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Record the samples of a step right after its update, before anything else can fail."""
        if self._is_writer and step != self._recorded_step:
            self._file.step(step, first_sample, result.samples, result.digest)

    def on_step_end(self, end: StepEnd) -> None:
        """Record that an update was skipped."""
        result = end.result
        if self._is_writer and result.skipped:
            facts = {"loss": str(result.loss), "norm": str(result.grad_norm)}
            self._file.event("skip", end.metrics.step, **facts)

    def close(self) -> None:
        """Log how many lines could not be written."""
        self._file.close()

    def on_rewind(self, rewind: Rewind) -> None:
        """Record a rewind."""
        if self._is_writer:
            self._file.event(
                "rewind",
                self.context.progress.step,
                spike=rewind.from_step,
                loss=rewind.loss,
                next_sample=self.context.progress.next_sample,
            )
