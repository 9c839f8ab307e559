"""Two-phase commit of one checkpoint over the ranks' key-value store: no collectives.

    writing   --every rank has arrived-->  sealed  --renamed-->  ended: committed
    writing   --a rank refuses, or does not arrive in time-->    ended: failed, with the first cause

`verdict` is written once, by whoever comes first: rank 0 to seal, or any rank to refuse. So no
rank can take a checkpoint for lost that rank 0 commits. Every wait is for one key, in the store's
server: ranks do not poll. The store is cloned, because a wait on a connection blocks all others
on it.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from frontier_llm.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_COMMIT = "commit"
_COMMITTED = ""
_MOST_NAMED = 8


class UndecidedError(CheckpointError):
    """Rank 0 or its store is lost: the checkpoint may or may not be there."""


class Ballot:
    """What ranks tell each other about one checkpoint.

    Every rank calls `arrive` or `refuse`. Rank 0 then calls `gather`, `seal` and `conclude` in
    this order, and `conclude` whatever happens; the others call `wait_for_end`.
    """

    def __init__(
        self, store: "Store", prefix: str, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Take a place at it.

        Args:
            store: used by this thread alone.
            prefix: of the keys; another one for each checkpoint.
            rank: of this process.
            world_size: number of ranks.
            timeout: how much later than this rank any other may be.
        """
        self._store, self._prefix = store, prefix
        self._rank, self._size, self._timeout = rank, world_size, timeout

    def arrive(self, record: str) -> None:
        """Say that this rank's part is on disk.

        Args:
            record: what rank 0 needs to know of it.

        Raises:
            UndecidedError: rank 0 is lost.
        """
        try:
            self._store.set(self._key(f"rank/{self._rank}"), record)
            if self._store.add(self._key("arrived"), 1) == self._size:
                self._store.set(self._key("ready"), "")
        except RuntimeError as error:
            raise UndecidedError(_no_answer(error)) from None

    def refuse(self, cause: str) -> str:
        """Make the checkpoint fail, unless it has been decided already.

        Returns:
            The first cause; "" where rank 0 has sealed: then it may still succeed.
        """
        verdict = self._decide(cause)
        self._store.set(self._key("ready"), "")
        return "" if verdict == _COMMIT else verdict

    def gather(self) -> list[str]:
        """Wait until all ranks have arrived, and return what they said. Rank 0 only.

        Raises:
            CheckpointError: a rank refused, or some did not arrive in time.
        """
        try:
            self._store.wait([self._key("ready")], self._timeout)
        except RuntimeError:
            raise CheckpointError(self._late()) from None
        if self._store.check([self._key("verdict")]):
            raise CheckpointError(self._read("verdict"))
        return self.records(range(self._size))

    def records(self, ranks: range) -> list[str]:
        """Return what some ranks said, once all have arrived.

        Raises:
            UndecidedError: rank 0's store is lost.
        """
        keys = [self._key(f"rank/{rank}") for rank in ranks]
        try:
            return [record.decode() for record in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise UndecidedError(_no_answer(error)) from None

    def seal(self) -> None:
        """Decide that the checkpoint is to be committed. Rank 0 only.

        Raises:
            CheckpointError: another rank has decided otherwise.
        """
        verdict = self._decide(_COMMIT)
        if verdict != _COMMIT:
            raise CheckpointError(verdict)

    def conclude(self, cause: str = _COMMITTED) -> None:
        """Tell all ranks how it ended: committed, or why not. Rank 0 only."""
        self._store.set(self._key("end"), json.dumps(cause))

    def wait_for_end(self) -> None:
        """Wait until rank 0 has concluded. Other ranks only.

        Raises:
            CheckpointError: the checkpoint failed; with the first cause.
            UndecidedError: rank 0 is lost.
        """
        try:
            cause = self._end()
            if cause is None:
                cause = self._refuse_once() or self._end()
        except RuntimeError as error:
            raise UndecidedError(_no_answer(error)) from None
        if cause is None:
            raise UndecidedError("rank 0 began to commit the checkpoint and was not heard again")
        if cause != _COMMITTED:
            raise CheckpointError(cause)

    def forget(self) -> None:
        """Remove the keys: when every rank has begun another one. Rank 0 only."""
        names = ["arrived", "ready", "late", "verdict", "end"]
        for name in [*names, *(f"rank/{rank}" for rank in range(self._size))]:
            self._store.delete_key(self._key(name))

    def _end(self) -> str | None:
        """Wait for rank 0's last word; None if it does not come."""
        try:
            self._store.wait([self._key("end")], self._timeout)
        except RuntimeError:
            return None
        cause: str = json.loads(self._store.get(self._key("end")))
        return cause

    def _refuse_once(self) -> str:
        """Refuse because time is over; return as `refuse`.

        Of all ranks that were kept waiting one asks the store who is missing: thousands would keep
        it from everything else.
        """
        if self._store.add(self._key("late"), 1) == 1:
            return self.refuse(self._late())
        self._store.wait([self._key("verdict")], self._timeout)
        verdict = self._read("verdict")
        return "" if verdict == _COMMIT else verdict

    def _decide(self, verdict: str) -> str:
        """Write the verdict if there is none; return the one that counts."""
        return str(self._store.compare_set(self._key("verdict"), "", verdict).decode())

    def _late(self) -> str:
        try:
            missing = [
                rank
                for rank in range(self._size)
                if not self._store.check([self._key(f"rank/{rank}")])
            ]
        except RuntimeError as error:
            return _no_answer(error)
        seconds = f"within {self._timeout.total_seconds():g} s"
        if not missing:
            return f"rank {self._rank}: all ranks wrote, and rank 0 did not commit {seconds}"
        return (
            f"{_ranks(missing)} did not write {seconds} of rank {self._rank} "
            "(checkpoint.timeout_seconds)"
        )

    def _read(self, name: str) -> str:
        return str(self._store.get(self._key(name)).decode())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _no_answer(error: RuntimeError) -> str:
    return f"the ranks' store does not answer (is rank 0 gone?): {str(error).splitlines()[0]}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return "ranks " + ", ".join(map(str, ranks[:_MOST_NAMED])) + more
