"""What the writers of checkpoints have in common: a thread, its error, and how steps ended."""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from frontier_llm.checkpoint.chunk_pool import SharedPool
from frontier_llm.checkpoint.commit_barrier import CommitBarrier, Ranks
from frontier_llm.checkpoint.job_thread import JobThread
from frontier_llm.checkpoint.manifest import Moments
from frontier_llm.errors import CheckpointError
from frontier_llm.geometry.host_pool import CHUNK_BYTES

_REMEMBERED = 1000

Outcome = Literal["committed", "skipped", "failed"]
"""How a checkpoint ended. `skipped`: given up in favour of a newer one, without an error."""


@dataclass(frozen=True)
class Options:
    """Settings of a `CheckpointManager` that most runs leave at their defaults."""

    keep_every_steps: int | None = None
    """Checkpoints whose step is a multiple of this number are kept forever."""
    pool_bytes: int | None = None
    """Limit in bytes of the host memory into which chunks are copied; None: enough for all
    chunks. With less memory, `fence` waits if the disk is slow."""
    chunk_bytes: int = CHUNK_BYTES
    """Size of a chunk in bytes, a multiple of 4096 (a page). Each write is one chunk."""
    folder_ranks: range | None = None
    """Ranks of this node, if each node has its own folder; None if all ranks share one folder. Two
    nodes may store the same elements, since each stores all that its ranks pass to `begin`."""
    file_ranks: range | None = None
    """Ranks of this node, if they write one file together; None if each rank writes its own."""
    ranks_on_host: int = 1
    """Number of ranks on this host. Each of them allocates the same amount of host memory."""
    pool: SharedPool | None = None
    """Host memory that this manager shares with others; None: it allocates its own."""
    moments: Moments | None = None
    """Format in which Adam's moments are stored; None: fp32."""
    in_flight: int = 1
    """Number of checkpoints that may be unwritten at the same time; `begin` waits beyond that."""
    on_end: Callable[[int, Outcome], None] = lambda _step, _outcome: None
    """Called by the writer with the step of a checkpoint when this rank knows how it ended."""
    spared: Callable[[], Collection[int]] = tuple
    """Returns steps that are not deleted now, because another thread reads or writes them."""


DEFAULTS = Options()


class CheckpointWriter:
    """Writes checkpoints to one place on one rank, one after the other, on a thread of its own.

    All ranks make their writers, and begin checkpoints, in the same order. One thread calls all
    methods. `outcomes` says how the last checkpoints ended, by step, as far as this rank knows.
    """

    def __init__(self, thread: str, ranks: Ranks) -> None:
        store = ranks.store.clone()  # type: ignore[attr-defined]  # the stubs lack it
        self._ranks = replace(ranks, store=store)
        self._writer = JobThread(thread)
        self._error: CheckpointError | None = None
        self._barriers: list[CommitBarrier] = []
        self.outcomes: dict[int, Outcome] = {}

    @property
    def failed(self) -> bool:
        """Whether `poll` would raise. All ranks exchange this value, so that they stop together."""
        return self._error is not None

    def poll(self) -> None:
        """Raise the first error since the last call, if it is already known. Never waits.

        Every rank gets the same cause, possibly at different times.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_for(self, seconds: float | None) -> bool:
        """Wait at most some seconds; return whether nothing is left to write."""
        return self._writer.wait_below(1, seconds)

    def close(self) -> None:
        """Wait until nothing is left to write; raise as `poll`."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Give up what is not committed, and wait until no thread uses states or files."""
        raise NotImplementedError

    def _make_barrier(self, prefix: str) -> CommitBarrier:
        barrier = CommitBarrier(prefix, self._ranks)
        if self._ranks.rank == 0:
            self._barriers.append(barrier)
        return barrier

    def _delete_keys_before(self, committed: CommitBarrier) -> None:
        """Delete the keys of earlier checkpoints from the store; no rank reads them any more."""
        with suppress(RuntimeError):  # the store is lost, and its keys with it
            while self._barriers[0] is not committed:
                self._barriers.pop(0).delete_keys()

    def _remember(self, step: int, outcome: Outcome) -> None:
        self.outcomes[step] = outcome
        for old in sorted(self.outcomes)[:-_REMEMBERED]:
            del self.outcomes[old]
