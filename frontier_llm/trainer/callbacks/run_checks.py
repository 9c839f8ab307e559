"""Callbacks that look for a loss that diverges, for damaged corpora and for slow ranks."""

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import torch
import torch.distributed as dist

from frontier_llm.data.corpora import BlendedSamples
from frontier_llm.data.corpus_manifest import Damage, find_damage, is_verified
from frontier_llm.errors import DataError, TrainingError
from frontier_llm.membership.roster_store import LateRanks
from frontier_llm.saving.restorer import Resumed
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.step_result import StepResult
from frontier_llm.units import MIB

_LOG = logging.getLogger(__name__)


class Divergence(Callback):
    """Ends a run whose losses or gradients are not finite; asks for a rewind if the loss spikes.

    A rewind is a return to the checkpoint before the spike. All ranks see the same numbers, so they
    make the same decisions without collectives. Before this callback ends the run, all ranks wait
    for the checkpoint that is being written.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._config, self._progress = context.config.trainer, context.progress

    def on_step_end(self, end: StepEnd) -> None:
        """Count bad steps, and ask for a rewind after a spike; too many raise a TrainingError."""
        self._count_bad_steps(end.result)
        if self.is_spike(end.result):
            self._count_rewind(end.result)
            end.rewind_reason = f"the loss spiked to {end.result.loss:.4g}"

    def is_spike(self, result: StepResult) -> bool:
        """Return whether the loss is far above recent losses; if not, add it to the recent losses.

        The recent losses are counters of the run: a resumed run judges like one without stops. A
        step whose update was skipped is never a spike, because it did not change the model.
        """
        factor, window = self._config.spike_factor, self._config.spike_window
        if result.skipped or factor is None:
            return False
        recent = self._progress.recent_losses
        if len(recent) == window and result.loss > factor * median(recent):
            return True
        self._progress.recent_losses = [*recent, result.loss][-window:]
        return False

    def _count_bad_steps(self, result: StepResult) -> None:
        """Count skipped steps in a row, and end the run if there are too many.

        In fp16 a step counts only if its loss is not finite or the loss scale cannot be lowered.
        """
        progress, allowed = self._progress, self._config.bad_steps_allowed
        loss_scale = self.context.train_step.loss_scale
        if not result.skipped:
            progress.bad_steps = 0
        elif not math.isfinite(result.loss) or loss_scale.is_at_minimum:
            progress.bad_steps += 1
        if progress.bad_steps > allowed:
            self._end_run(
                f"step {progress.step}: the loss is {result.loss:.4g} and the gradient norm "
                f"{result.grad_norm:.4g}, not finite for {progress.bad_steps} steps in a row "
                f"(trainer.bad_steps_allowed={allowed}). These steps were not applied\n"
                f"  do: {_calmer(self.context)}"
            )

    def _count_rewind(self, result: StepResult) -> None:
        progress, allowed = self._progress, self._config.rewinds_allowed
        if progress.rewinds >= allowed:
            self._end_run(
                f"step {progress.step}: the loss spiked to {result.loss:.4g} after "
                f"{progress.rewinds} rewinds (trainer.rewinds_allowed={allowed}). Lower "
                "optimizer.learning_rate, or look at the samples of these steps in ledger.jsonl"
            )
        progress.rewinds += 1

    def _end_run(self, message: str) -> None:
        """Wait until the checkpoint being written is committed, then raise a TrainingError."""
        with self.context.control.watchdog.phase("checkpoint"):
            self.context.checkpoints.finish()
        raise TrainingError(message)


_BYTES_PER_SECOND = 200 * MIB
"""Largest rate of reading, a small share of what a file system delivers."""
_END_SECONDS = 10.0
"""How long the end of a run waits for the corpus to be read."""
_SEARCHED_SAMPLES = 1 << 18
"""Number of samples among which the first reader of damaged bytes is searched."""


class FiniteModel(Callback):
    """Lets a run fail at its end if its model computes no loss: no text can be sampled from it."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._validation_loss = 0.0  # of the model as it is, if all steps are done

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Note the loss of the model."""
        self._validation_loss = validation_loss

    def on_evaluation(self, step: int, validation_loss: float) -> None:
        """Note the loss of the model."""
        self._validation_loss = validation_loss

    def on_stop(self, *, is_early: bool) -> None:
        """Raise a TrainingError if the loss of the last model is not finite."""
        loss, progress = self._validation_loss, self.context.progress
        if is_early or math.isfinite(loss):
            return
        since = ""
        if progress.bad_steps:
            first = progress.step - progress.bad_steps + 1
            since = f", and the loss has not been finite since step {first}"
        raise TrainingError(
            f"step {progress.step}: the validation loss is {loss:.4g}{since}: the model cannot be "
            "used, and no text is sampled from it\n"
            f"  do: {_calmer(self.context)}, and start again in another run.dir"
        )


def _calmer(context: TrainerContext) -> str:
    """Say what may keep a loss finite."""
    wider = {"fp16": ["bf16", "fp32"], "bf16": ["fp32"]}.get(context.model.layout.precision, [])
    precision = f", or use precision={' or '.join(wider)}" if wider else ""
    return f"lower optimizer.learning_rate, raise optimizer.warmup_steps{precision}"


class _StoppedError(Exception):
    """The run has ended before the files were read."""


class CorpusIntegrity(Callback):
    """Ends the run if a corpus no longer has the digests that it was prepared with.

    Reads in the background of the first steps, once per corpus, on rank 0. Runs no collectives. At
    the end of a shorter run it reads on for up to `_END_SECONDS`, without pauses.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._found: Damage | OSError | None = None
        self._is_closed, self._hurries = False, threading.Event()
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
        self._raise_damage()

    def on_stop(self, *, is_early: bool) -> None:
        """Let the run fail if there is damage; log a warning if the files were not all read."""
        if self._thread.is_alive() and not is_early:
            self._hurries.set()
            self._thread.join(_END_SECONDS)
        is_unfinished = self._thread.is_alive()  # before the result is looked at
        self._raise_damage()
        if is_unfinished:
            _LOG.warning(
                "the run ended before its prepared corpus was compared with its digests, so that "
                "changed bytes may be unnoticed; frontier-llm inspect-data %s --verify compares it",
                self.context.config.run.dir,
            )

    def _raise_damage(self) -> None:
        if isinstance(self._found, OSError):
            raise DataError(f"a prepared corpus cannot be read: {self._found}")
        if self._found is not None:
            raise DataError(f"{self._found}\n  {self._readers(self._found)}")

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._hurries.set()
        if self._thread.is_alive():
            self._thread.join()

    def _check(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for corpus in self.context.data.corpus.corpora:
                folder = corpus.train.prefix.parent
                if not is_verified(folder):
                    self._found = find_damage(folder, self._pause)
                if self._found is not None:
                    return
        except OSError as error:
            self._found = error
        except _StoppedError:
            return

    def _pause(self, count: int) -> None:
        self._hurries.wait(count / _BYTES_PER_SECOND)
        if self._is_closed:
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


_PROBE_SECONDS = 0.1
"""How long a rank repeats the matrix product in one comparison."""
_SIZES = {"cpu": 256, "cuda": 4096, "hip": 4096}
"""Number of rows and columns of the matrices, by kind of device. A product takes milliseconds, so
that it is repeated many times in `_PROBE_SECONDS`."""


class Stragglers(Callback):
    """Finds slow ranks: all ranks time the same matrix product and compare.

    Ranks wait for each other in every step, so all step times are as long as those of the slowest
    rank and do not show which rank is slow. Therefore each rank also times a matrix product, for
    which it waits for nobody. It is slow on a hot device, on a core that another process uses, or
    under a wrong power limit.

    A comparison every `watchdog.stragglers_every_steps` steps is collective over all ranks: one
    all-reduce of one number per rank. Rank 0 logs the ranks that are slow in two comparisons in a
    row.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._config, self._world = context.config.watchdog, context.world
        self._accelerator = context.hardware.accelerator
        self._suspects: set[int] = set()

    def on_step_end(self, end: StepEnd) -> None:
        """Compare the ranks, if a comparison is due after this step."""
        self.compare(end.metrics.step)

    def compare(self, step: int) -> list[int]:
        """Return the ranks that are slow for the second time in a row, if a comparison is due."""
        every = self._config.stragglers_every_steps
        if not every or step % every or self._world.size == 1:
            return []
        seconds = self._gather(self._probe())
        slow = set(slower_than(seconds, self._config.straggler_ratio))
        again = sorted(slow & self._suspects)
        self._suspects = slow
        if again and self._world.rank == 0:
            self._warn(step, again, seconds)
            self._ask_for_others(step, again)
        return again

    def _ask_for_others(self, step: int, slow: Sequence[int]) -> None:
        report = self.context.control.watchdog.report_late
        if self._config.replace_stragglers and report is not None:
            names = self._world.name_ranks(slow)
            report(LateRanks(slow, f"step {step}: {names} is slow and is replaced", elsewhere=True))

    def _warn(self, step: int, slow: Sequence[int], seconds: Sequence[float]) -> None:
        typical = median(seconds)
        for rank in slow:
            _LOG.warning(
                "step %d: %s is slow: a matrix product takes %.1f times the median of all ranks",
                step,
                self._world.name_ranks([rank]),
                seconds[rank] / typical,
            )

    def _probe(self) -> float:
        accelerator, size = self._accelerator, _SIZES[self._accelerator.kind]
        matrix = torch.ones(size, size, dtype=torch.float32, device=accelerator.device)
        torch.matmul(matrix, matrix)  # warm-up
        accelerator.synchronize()
        times: list[float] = []
        end = time.perf_counter() + _PROBE_SECONDS
        while (start := time.perf_counter()) < end or not times:
            torch.matmul(matrix, matrix)
            accelerator.synchronize()
            times.append(time.perf_counter() - start)
        return median(times)

    def _gather(self, seconds: float) -> list[float]:
        device = self._accelerator.device
        by_rank = torch.zeros(self._world.size, dtype=torch.float64, device=device)
        by_rank[self._world.rank] = seconds
        dist.all_reduce(by_rank)
        return list(by_rank.tolist())


def slower_than(seconds: Sequence[float], ratio: float) -> list[int]:
    """Return the indices whose time is more than `ratio` times the median."""
    limit = ratio * median(seconds)
    return [index for index, value in enumerate(seconds) if value > limit]
