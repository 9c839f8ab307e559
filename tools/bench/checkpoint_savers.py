"""Ways to save a rank's states and to read them back: ours, and those of torch.

Every rank makes its saver and calls the same methods in the same order. Each keeps one checkpoint:
when a newer one is complete, the one before is deleted.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from frontier_llm.checkpoint.manager import CheckpointManager, Options
from frontier_llm.checkpoint.names import step_folder
from frontier_llm.checkpoint.restore import load
from frontier_llm.checkpoint.scan import newest
from tools.bench import disk
from tools.bench.checkpoint_states import KnownStates
from tools.bench.disk import sync_file

if TYPE_CHECKING:
    from torch.distributed import Store

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Place:
    """Where a rank is and saves."""

    rank: int
    ranks: int
    store: "Store"
    """Where the ranks met."""
    folder: Path
    """Empty at first; the same on all ranks."""


class Saver:
    """One rank's way to save. Here: one that holds training up until it is done."""

    gives_back = True
    """Whether states can be restored."""

    def __init__(self, states: KnownStates, place: Place) -> None:
        self._states, self._place = states, place

    def save(self, step: int) -> None:
        """Save the states as they are, or begin to."""
        raise NotImplementedError

    def fence(self) -> None:
        """Return when the states may change."""

    def is_durable(self) -> bool:
        """Whether the last checkpoint is known to be on disk and complete for every rank."""
        return True

    def settle(self) -> None:
        """Wait until the last checkpoint is as complete as it will be."""

    def restore(self) -> None:
        """Overwrite the states with the last checkpoint."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what was taken."""


class Ours(Saver):
    """frontier_llm.checkpoint."""

    def __init__(
        self, states: KnownStates, place: Place, mode: Literal["blocking", "lazy"]
    ) -> None:
        super().__init__(states, place)
        self._step = 0
        self._manager = CheckpointManager(
            place.folder, place.rank, place.ranks, place.store, mode, 1, TIMEOUT,
            Options(neighbours=place.ranks),
        )  # fmt: skip
        self._manager.prepare(states.shards)

    def save(self, step: int) -> None:
        """Begin a checkpoint, after the one before."""
        self._step = step
        self._manager.begin(step, self._states.shards, {})

    def fence(self) -> None:
        """Copy what is not written yet."""
        self._manager.fence()

    def is_durable(self) -> bool:
        """Rank 0's thread still deletes the one before; the others' end when they are told."""
        if self._place.rank == 0:
            return (self._place.folder / step_folder(self._step)).exists()
        return all(thread.name != "checkpoint" for thread in threading.enumerate())

    def settle(self) -> None:
        """Wait for the commit."""
        self._manager.close()

    def restore(self) -> None:
        """Find the newest and load it, digests compared."""
        checkpoint = newest(self._place.folder)
        assert checkpoint is not None
        load(checkpoint, self._states.shards)


class TorchSave(Saver):
    """torch.save of a rank's tensors, a file a rank; then the ranks wait for each other."""

    def __init__(self, states: KnownStates, place: Place, *, sync: bool) -> None:
        super().__init__(states, place)
        self._sync = sync
        self._path = place.folder / "none"

    def save(self, step: int) -> None:
        """Write this rank's file, and delete the one before."""
        before = self._path
        self._path = self._place.folder / f"step_{step}_rank_{self._place.rank}.pt"
        torch.save(self._states.tensors, self._path)
        if self._sync:
            sync_file(self._path)
        dist.barrier()
        before.unlink(missing_ok=True)

    def is_durable(self) -> bool:
        """Without a sync nobody knows."""
        return self._sync

    def restore(self) -> None:
        """Read the file, and copy from what was read."""
        saved = torch.load(self._path, weights_only=True)
        for name, tensor in self._states.tensors.items():
            tensor.copy_(saved[name])


class Dcp(Saver):
    """torch.distributed.checkpoint.save; it syncs its files, and writes its metadata last."""

    def __init__(self, states: KnownStates, place: Place) -> None:
        super().__init__(states, place)
        self._path = self._before = place.folder / "none"

    def save(self, step: int) -> None:
        """Write a folder, and delete the one before."""
        self._next(step)
        dcp.save(self._states.tensors, checkpoint_id=self._path)
        self._delete_before()

    def restore(self) -> None:
        """Read into the tensors themselves."""
        dcp.load(self._states.tensors, checkpoint_id=self._path)

    def _next(self, step: int) -> None:
        self._before, self._path = self._path, self._place.folder / f"step_{step}"

    def _delete_before(self) -> None:
        if self._place.rank == 0 and self._before.is_dir():
            shutil.rmtree(self._before)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, in its threads.

    By default it copies the states before it returns. With a DefaultStager of the caller it copies
    in a thread, into memory that it keeps: the fence waits for that.
    """

    def __init__(self, states: KnownStates, place: Place, *, stager: bool) -> None:
        super().__init__(states, place)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for its thread alone
        options = StagingOptions(
            use_pinned_memory=False,  # this and non-blocking copies need a GPU
            use_non_blocking_copy=False,
            use_shared_memory=False,
            use_async_staging=True,
        )
        self._stager = DefaultStager(options) if stager else None
        self._copied: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Begin a checkpoint, after the one before."""
        self.settle()
        self._next(step)
        answer: Any = dcp.async_save(
            self._states.tensors,
            checkpoint_id=self._path,
            process_group=self._group,
            async_stager=self._stager,
        )
        if self._stager is None:
            self._written = answer
        else:
            self._copied, self._written = answer.staging_completion, answer.upload_completion

    def fence(self) -> None:
        """Wait for the copy."""
        if self._copied is not None:
            self._copied.result()

    def is_durable(self) -> bool:
        """Whether its thread is through."""
        return self._written is None or self._written.done()

    def settle(self) -> None:
        """Wait for its thread, and delete the one before."""
        if self._written is not None:
            self._written.result()
            self._written = None
            self._delete_before()

    def close(self) -> None:
        """End the stager's thread."""
        if self._stager is not None:
            self._stager.close()


class BareWrites(Saver):
    """As many bytes from one buffer, by a thread that does nothing else: no copy, no content.

    What this costs, the machine takes from everybody who writes that fast.
    """

    gives_back = False

    def __init__(self, states: KnownStates, place: Place) -> None:
        super().__init__(states, place)
        self._path = place.folder / f"bare_{place.rank}"
        self._buffer = disk.filled_buffer()
        self._thread: threading.Thread | None = None

    def save(self, step: int) -> None:
        """Overwrite the file."""
        self.settle()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def is_durable(self) -> bool:
        """Whether the thread is through."""
        return self._thread is None or not self._thread.is_alive()

    def settle(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        disk.write_blocks(self._path, self._buffer, -(-self._states.size // disk.BLOCK_BYTES))


SAVERS: dict[str, tuple[str, Callable[[KnownStates, Place], Saver]]] = {
    "ours-lazy": ("checkpoint=lazy", lambda s, p: Ours(s, p, "lazy")),
    "ours-blocking": ("checkpoint=blocking", lambda s, p: Ours(s, p, "blocking")),
    "torch.save": ("torch.save, not synced", lambda s, p: TorchSave(s, p, sync=False)),
    "torch.save-fsync": ("torch.save, fsync", lambda s, p: TorchSave(s, p, sync=True)),
    "dcp": ("torch.distributed.checkpoint.save", Dcp),
    "dcp-async": ("its async_save", lambda s, p: DcpAsync(s, p, stager=False)),
    "dcp-async-stager": (
        "its async_save with a DefaultStager that is kept",
        lambda s, p: DcpAsync(s, p, stager=True),
    ),
    "bare-writes": ("as many bytes from one buffer", BareWrites),
}
"""By name: what it is, and how a rank makes it."""
