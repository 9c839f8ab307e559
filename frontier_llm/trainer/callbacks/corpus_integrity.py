"""Compares the run's corpora with their digests in the background of the first steps."""

import os
import threading
from contextlib import suppress

from frontier_llm.data.corpora import BlendedSamples
from frontier_llm.data.corpus_manifest import Damage, find_damage, is_verified
from frontier_llm.errors import DataError
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.resume import Resumed
from frontier_llm.units import MIB

_BYTES_PER_SECOND = 200 * MIB
"""Largest rate of reading, a small share of what a file system delivers."""
_SEARCHED_SAMPLES = 1 << 18
"""Number of samples among which the first reader of damaged bytes is searched."""


class _StoppedError(Exception):
    """The run has ended before the files were read."""


class CorpusIntegrity(Callback):
    """Ends the run if a file has changed. Reads once per corpus, on rank 0. Runs no collectives."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._found: Damage | OSError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._check, name="corpus check", daemon=True)

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Start to read the corpora that were not read since they were prepared."""
        self.on_replacement(0)

    def on_replacement(self, last_step: int) -> None:
        """Start again, as at the start of a run."""
        if self.context.world.rank == 0:
            self._thread.start()

    def on_step_end(self, end: StepEnd) -> None:
        """End the run if the thread has found damage."""
        self.on_stop(is_early=False)

    def on_stop(self, *, is_early: bool) -> None:
        """Let the run fail if the thread has found damage."""
        if isinstance(self._found, OSError):
            raise DataError(f"a prepared corpus cannot be read: {self._found}")
        if self._found is not None:
            raise DataError(f"{self._found}\n  {self._readers(self._found)}")

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _check(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for corpus in self.context.data.corpus.corpora:
                folder = corpus.train.prefix.parent
                if not is_verified(folder):
                    self._found = find_damage(folder, corpus.manifest, self._pause)
                if self._found is not None:
                    return
        except OSError as error:
            self._found = error
        except _StoppedError:
            return

    def _pause(self, count: int) -> None:
        if self._stop.wait(count / _BYTES_PER_SECOND):
            raise _StoppedError

    def _readers(self, damage: Damage) -> str:
        """Return a sentence on the steps that may have read damaged bytes of a corpus."""
        if damage.path.name.startswith("validation"):
            return "the validation losses so far may be wrong"
        context, sample = self.context, 0
        samples = context.data.windows
        if damage.path.suffix == ".bin" and not isinstance(samples, BlendedSamples):
            size = context.data.corpus.corpora[0].train.item_bytes
            searched = min(context.progress.next_sample, _SEARCHED_SAMPLES)
            while sample < searched and not any(
                start * size < damage.end and (start + count) * size > damage.start
                for start, count in samples.ranges(sample)
            ):
                sample += 1
        first, last = sample // context.config.data.global_batch + 1, context.progress.step
        if first > last:
            return "no step so far has read these bytes"
        return (
            f"steps {first} to {last} may have read these bytes: move the checkpoints of step "
            f"{first} and later away to train on from an earlier one"
        )
