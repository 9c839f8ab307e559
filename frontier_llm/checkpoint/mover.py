"""Copy committed checkpoints of the nodes' disks to another place, while training continues.

All ranks enqueue the same steps. Each rank copies its part on a thread of its own, and the ranks
commit the copy together, as they commit a checkpoint (`save`). A copy that was not committed is
therefore never taken for a checkpoint. If copying is slower than saving, rank 0 skips steps of
which a newer one is ready, so that the copies do not fall behind and the disks do not fill.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from frontier_llm.checkpoint.commit_barrier import CommitBarrier, Ranks, UnknownOutcomeError
from frontier_llm.checkpoint.save import NodeCommitError
from frontier_llm.checkpoint.writer import CheckpointWriter, Outcome
from frontier_llm.errors import CheckpointError
from frontier_llm.units import format_seconds

_log = logging.getLogger(__name__)
_REMEMBERED = 1000
Copy = Callable[[int, dict[str, Any], CommitBarrier], None]
"""Copies this rank's part of a checkpoint and commits it: (step, meta, barrier)."""


class Mover(CheckpointWriter):
    """Copies checkpoints of the nodes' disks to `target`, on a thread with a name.

    `copy` copies this rank's part. A permanent step is never skipped.

    Attributes:
        is_redundant: whether the copies are of use only if a node is lost, so that a failure is a
            warning, which `poll` does not raise.
        patience_seconds: `poll` raises also failures of redundant copies if none has succeeded for
            so long; None = it never does.
        newest: step of the newest copy that this object has made; None before the first one.
    """

    def __init__(
        self,
        name: str,
        target: str,
        ranks: Ranks,
        copy: Copy,
        is_permanent: Callable[[int], bool] = lambda _: False,
    ) -> None:
        super().__init__(name, ranks)
        self._name, self._target, self._copy, self._is_permanent = name, target, copy, is_permanent
        self.is_redundant = False
        self.patience_seconds: float | None = None
        self.newest: int | None = None
        self._succeeded = math.inf  # monotonic time of the newest copy, or of the first try
        self._changed = threading.Condition()
        self._queue: list[int] = []  # steps that are not copied yet, in order
        self._saved: dict[int, Outcome] = {}  # how the checkpoints on the nodes' disks ended
        self._numbered = 0

    def enqueue(self, step: int, meta: dict[str, Any], *, is_saved: bool = False) -> None:
        """Copy a checkpoint as soon as it is committed on the nodes' disks.

        Collective over all ranks. `is_saved`: it is committed already. `meta` is plain JSON for
        the manifest of the copy.
        """
        with self._changed:
            self.outcomes.pop(step, None)
            self._queue.append(step)
            self._numbered += 1
            number = self._numbered
            self._saved.pop(step, None)
            if is_saved:
                self._saved[step] = "committed"
        self._writer.submit(lambda: self._move(number, step, meta))

    def saved(self, step: int, outcome: Outcome) -> None:
        """Take note of how a checkpoint on the nodes' disks ended. Any thread calls this."""
        with self._changed:
            self._saved[step] = outcome
            for old in sorted(self._saved)[:-_REMEMBERED]:
                if old not in self._queue:
                    del self._saved[old]
            self._changed.notify_all()

    def spared(self) -> Collection[int]:
        """Return steps that must stay on the nodes' disks: those that may be copied next.

        Rank 0 skips a step if it knows that a newer one is committed. If this rank knows that two
        newer ones are, rank 0 knows of the first, because it commits one after the other.
        """
        with self._changed:
            committed = [step for step in self._queue if self._saved.get(step) == "committed"]
            oldest = min(committed[-2:], default=0) if len(committed) > 1 else 0
            wanted = (s for s in self._queue if s >= oldest or self._is_permanent(s))
            return {*self._queue[:1], *wanted}

    def queued(self) -> Collection[int]:
        """Return the steps that are being copied or wait for it.

        Nobody else may remove their unfinished copies: a step that waits now may be copied by the
        time at which the folder is read.
        """
        with self._changed:
            return tuple(self._queue)

    def abandon(self) -> None:
        """Wait until nothing is copied; other ranks are gone, so that no copy is committed."""
        with self._changed:
            for step in self._queue:
                self._saved.setdefault(step, "failed")
            self._changed.notify_all()
        self.wait()
        self._error = None

    def wait(self) -> None:
        """Wait until every enqueued step is copied or skipped, or has failed."""
        self._writer.wait_below(1)

    def close(self) -> None:
        """Wait like `wait`, then raise like `poll`."""
        self.wait()
        self.poll()

    def _move(self, number: int, step: int, meta: dict[str, Any]) -> None:
        outcome: Outcome = "failed"
        begin = time.monotonic()
        self._succeeded = min(self._succeeded, begin)
        prefix = f"checkpoint/{self._name}/{number}"
        try:
            if self._is_chosen(prefix, step):
                barrier = self._make_barrier(prefix)
                self._copy(step, meta, barrier)
                outcome = "committed"
                self._succeeded, self.newest = time.monotonic(), step
                if self._ranks.rank == 0:
                    duration = format_seconds(time.monotonic() - begin)
                    _log.info("step %d is copied to %s: %s", step, self._target, duration)
                    self._delete_keys_before(barrier)
            else:
                outcome = "skipped"
        except Exception as error:
            text = f"step {step} is not copied to {self._target}: {error}"
            if self.is_redundant:
                step_text = f"the newest copy is of step {self.newest}"
                text += f"; {'there is no copy' if self.newest is None else step_text}"
            seconds = time.monotonic() - self._succeeded
            if not self.is_redundant:
                self._error = self._error or CheckpointError(text)
            elif self.patience_seconds is not None and seconds > self.patience_seconds:
                text += f", from {format_seconds(seconds)} ago (checkpoint.protection_minutes)"
                self._error = self._error or CheckpointError(text)
            else:
                text += ". Training goes on, and the next step is tried"
            if self._ranks.rank == 0 or isinstance(error, NodeCommitError):
                _log.warning("%s", text)
        with self._changed:
            self._queue.remove(step)
            self._remember(step, outcome)

    def _is_chosen(self, prefix: str, step: int) -> bool:
        """Return whether a step is copied or skipped, which rank 0 decides for all ranks."""
        key = f"{prefix}/order"
        if self._ranks.rank == 0:
            chosen = self._choose(step)
            self._ranks.store.set(key, "copy" if chosen else "skip")
            return chosen
        while True:
            begin = time.monotonic()
            try:
                self._ranks.store.wait([key], self._ranks.timeout)
                return bool(self._ranks.store.get(key) == b"copy")
            except RuntimeError as error:
                if time.monotonic() - begin < self._ranks.timeout.total_seconds() / 2:
                    raise UnknownOutcomeError(f"the ranks' store is lost: {error}") from None

    def _choose(self, step: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: step in self._saved)
            newer = [s for s in self._queue if s > step and self._saved.get(s) == "committed"]
            if self._saved[step] != "committed":
                return False
            if newer and not self._is_permanent(step):
                _log.info("step %d is not copied to %s: step %d is", step, self._target, newer[-1])
                return False
            return True
