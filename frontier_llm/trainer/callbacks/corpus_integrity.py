"""Compares the run's corpora with their digests in the background of the first steps."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from frontier_llm.data.corpus_check import Damage, find_damage, is_verified
from frontier_llm.data.run_loader import window_corpus
from frontier_llm.errors import DataError
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.resume import Resumed
from frontier_llm.units import MIB

_BYTES_PER_SECOND = 200 * MIB
"""Largest rate of reading, a small share of what a file system delivers."""
_SEARCHED_SAMPLES = 1 << 18


class _StoppedError(Exception):
    """The run has ended before the files were read."""


class CorpusIntegrity(Callback):
    """Ends the run if a file has changed. Reads once per corpus, on rank 0. Runs no collectives."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._found: tuple[int, Damage] | OSError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._check, name="corpus check", daemon=True)

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Start to read the corpora that were not read since they were prepared."""
        if self.context.world.rank == 0:
            self._thread.start()

    def on_replacement(self, last_step: int) -> None:
        """Start again, as at the start of a run."""
        if self.context.world.rank == 0:
            self._thread.start()

    def on_step_end(self, end: StepEnd) -> None:
        """End the run if the thread has found damage."""
        self._raise_error()

    def on_stop(self, *, is_early: bool) -> None:
        """Let the run fail if the thread has found damage."""
        self._raise_error()

    def _raise_error(self) -> None:
        if isinstance(self._found, OSError):
            raise DataError(f"a prepared corpus cannot be read: {self._found}")
        if self._found is not None:
            raise DataError(self._describe(*self._found))

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _check(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with suppress(_StoppedError):
            for number, corpus in enumerate(self.context.data.corpus.corpora):
                folder = corpus.train.prefix.parent
                try:
                    if not is_verified(folder):
                        damage = find_damage(folder, corpus.manifest, self._pause)
                        self._found = self._found or ((number, damage) if damage else None)
                except OSError as error:
                    self._found = self._found or error

    def _pause(self, count: int) -> None:
        if self._stop.wait(count / _BYTES_PER_SECOND):
            raise _StoppedError

    def _describe(self, number: int, damage: Damage) -> str:
        """Return the message, with the steps that may have read the damaged bytes."""
        progress, data = self.context.progress, self.context.data
        if damage.path.name.startswith("validation"):
            return f"{damage}\n  the validation losses so far may be wrong"
        first, corpus = 1, data.corpus.corpora[number]
        if damage.path.suffix == ".bin" and data.blend is None:
            samples = window_corpus(self.context.config, corpus, train=True)
            item_bytes = corpus.manifest.token_type().itemsize
            span = range(damage.start // item_bytes, -(-damage.end // item_bytes))
            searched = min(progress.next_sample, _SEARCHED_SAMPLES)
            first_sample = next(
                (index for index in range(searched)
                 if any(start < span.stop and start + count > span.start
                        for start, count in samples.ranges(index))),
                searched,
            )  # fmt: skip
            first = first_sample // self.context.config.data.global_batch + 1
        if first > progress.step:
            return f"{damage}\n  no step so far has read these bytes"
        return (
            f"{damage}, and move away the checkpoints of step {first} and later in "
            f"{Path(self.context.config.run.dir)}: steps {first} to {progress.step} may have read "
            "these bytes"
        )
