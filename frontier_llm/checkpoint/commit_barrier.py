"""Two-phase commit of one checkpoint, through torch's key-value store instead of collectives.

Collectives belong to the main thread, but a checkpoint is committed in the writer threads.
States of a checkpoint:

- writing: ranks write their files. Each rank calls `arrive` when its file is on disk.
- sealed: all ranks have arrived, and rank 0 has decided to commit (`seal`).
- committed: rank 0 has renamed the folder and published success (`conclude`).
- failed: a rank called `abort` or did not arrive in time. The first cause is published.

    writing -> sealed -> committed
    writing -> failed

Keys in the store, all below one prefix per checkpoint:

- `rank/N`: record of rank N, for the manifest. `arrived`: number of ranks that have written it.
- `ready`: set when all ranks have arrived or one has aborted. Rank 0 waits for this key.
- `decision`: "commit", or the cause of an abort. Set once, by compare-and-set: by rank 0 to seal,
  or by any rank to abort. After rank 0 has sealed, no rank can therefore make the checkpoint fail.
- `end`: the outcome, published by rank 0. The other ranks wait for this key.
- `late`: number of ranks whose wait for `end` timed out.

A wait blocks in the store's server, so ranks do not poll. It also occupies its connection to the
store, so the caller passes a clone of the store.
"""

import json
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

from frontier_llm.errors import CheckpointError
from frontier_llm.launch.coordination import read_all
from frontier_llm.units import name_ranks

_COMMIT = "commit"
"""Value of the key `decision` after rank 0 has sealed the checkpoint."""
_COMMITTED = ""
"""Value of the key `end` after success; after a failure its value is the cause."""
_MOST_NAMED = 8


class UnknownOutcomeError(CheckpointError):
    """Rank 0 or its store is lost, so it is unknown whether the checkpoint was committed."""


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, as one of them sees them."""

    rank: int
    size: int
    store: Store
    """Key-value store of all ranks."""
    timeout: timedelta
    """How long a rank waits for the others after it has written its part."""


class CommitBarrier:
    """Lets all ranks agree on whether one checkpoint is committed.

    Every rank calls `arrive` or `abort`. Then rank 0 calls `wait_for_ranks`, `seal` and `conclude`
    in this order; after a failure it calls `conclude` at once. The other ranks call
    `wait_for_outcome`. No other thread may use this connection to the store. The timeout counts
    from the arrival of this rank. An UnknownOutcomeError is raised if rank 0 or its store is lost.
    """

    def __init__(self, prefix: str, ranks: Ranks) -> None:
        self._store, self._prefix = ranks.store, prefix
        self._rank, self._size, self._timeout = ranks.rank, ranks.size, ranks.timeout

    def arrive(self, record: str) -> None:
        """Report that this rank's file is on disk, with its description for the manifest."""
        try:
            self._store.set(self._key(f"rank/{self._rank}"), record)
            if self._store.add(self._key("arrived"), 1) == self._size:
                self._store.set(self._key("ready"), "")
        except RuntimeError as error:
            raise UnknownOutcomeError(_describe_lost_store(error)) from None

    def abort(self, cause: str) -> str:
        """Make the checkpoint fail, unless the decision has already been made.

        Returns the cause of the first abort; "" if rank 0 has sealed, so that it may still succeed.
        """
        decision = self._decide(cause)
        self._store.set(self._key("ready"), "")
        return "" if decision == _COMMIT else decision

    def wait_for_ranks(self) -> list[str]:
        """Wait until all ranks have arrived, and return their records. Rank 0 only.

        A CheckpointError is raised if a rank aborts, or some ranks do not arrive in time.
        """
        try:
            self._store.wait([self._key("ready")], self._timeout)
        except RuntimeError:
            raise CheckpointError(self._describe_late_ranks()) from None
        if self._store.check([self._key("decision")]):
            raise CheckpointError(self._read("decision"))
        return self.records(range(self._size))

    def records(self, ranks: range) -> list[str]:
        """Return the records of some ranks. Call this only after all ranks have arrived."""
        keys = [self._key(f"rank/{rank}") for rank in ranks]
        try:
            return [record.decode() for record in read_all(self._store, keys)]
        except RuntimeError as error:
            raise UnknownOutcomeError(_describe_lost_store(error)) from None

    def seal(self) -> None:
        """Decide to commit, or raise a CheckpointError if another rank has aborted. Rank 0 only."""
        decision = self._decide(_COMMIT)
        if decision != _COMMIT:
            raise CheckpointError(decision)

    def conclude(self, cause: str = _COMMITTED) -> None:
        """Publish to all ranks why the checkpoint failed; "": it is committed. Rank 0 only."""
        self._store.set(self._key("end"), json.dumps(cause))

    def wait_for_outcome(self) -> None:
        """Wait until rank 0 has published the outcome. All ranks but rank 0.

        A CheckpointError has the first cause of a failure.
        """
        try:
            cause = self._wait_for_end()
            if cause is None:
                # after an abort its cause is the outcome; if rank 0 has sealed, wait once more
                cause = self._abort_after_timeout() or self._wait_for_end()
        except RuntimeError as error:
            raise UnknownOutcomeError(_describe_lost_store(error)) from None
        if cause is None:
            raise UnknownOutcomeError(
                "rank 0 started to commit the checkpoint and did not report the outcome"
            )
        if cause != _COMMITTED:
            raise CheckpointError(cause)

    def delete_keys(self) -> None:
        """Delete the keys from the store, once every rank has begun a later checkpoint. Rank 0."""
        names = ["arrived", "ready", "late", "decision", "end"]
        for name in [*names, *(f"rank/{rank}" for rank in range(self._size))]:
            self._store.delete_key(self._key(name))

    def _wait_for_end(self) -> str | None:
        self._store.set_timeout(self._timeout)
        try:
            # it waits until the key is set: with `wait` before it, the server would be asked twice
            end = self._store.get(self._key("end"))
        except RuntimeError:
            return None
        return str(json.loads(end))

    def _abort_after_timeout(self) -> str:
        """Abort because a rank is late, and return the same as `abort`.

        Only the first rank whose wait times out asks the store which ranks are missing. If
        thousands of ranks asked, they would block the store, which has a single thread.
        """
        if self._store.add(self._key("late"), 1) == 1:
            return self.abort(self._describe_late_ranks())
        self._store.wait([self._key("decision")], self._timeout)
        decision = self._read("decision")
        return "" if decision == _COMMIT else decision

    def _decide(self, decision: str) -> str:
        return str(self._store.compare_set(self._key("decision"), "", decision).decode())

    def _describe_late_ranks(self) -> str:
        try:
            missing = [
                rank
                for rank in range(self._size)
                if not self._store.check([self._key(f"rank/{rank}")])
            ]
        except RuntimeError as error:
            return _describe_lost_store(error)
        seconds = f"within {self._timeout.total_seconds():g} s"
        if not missing:
            return f"rank {self._rank}: all ranks wrote, and rank 0 did not commit {seconds}"
        return (
            f"{name_ranks(missing, _MOST_NAMED)} did not write {seconds} of rank {self._rank} "
            "(checkpoint.timeout_seconds)"
        )

    def _read(self, name: str) -> str:
        return str(self._store.get(self._key(name)).decode())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _describe_lost_store(error: RuntimeError) -> str:
    return f"the ranks' store does not answer (is rank 0 gone?): {str(error).splitlines()[0]}"
