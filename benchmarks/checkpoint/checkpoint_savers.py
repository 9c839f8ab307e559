"""Savers of bench_checkpoint: ways to save and restore a rank's states, with frontier_llm or torch.

Every rank creates its saver and calls the same methods in the same order. A saver keeps one
checkpoint: when a newer one is complete, the previous one is deleted.
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

from benchmarks.checkpoint.checkpoint_states import SavedStates
from benchmarks.testbed import disk
from benchmarks.testbed.disk import sync_file
from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manager_options import Options
from frontier_llm.checkpoint.restore import load

if TYPE_CHECKING:
    from torch.distributed import Store

TIMEOUT = timedelta(seconds=120)
"""Time limit of collectives and of the commit of a checkpoint."""


@dataclass(frozen=True)
class Place:
    """The rank on which a saver runs, and the folder it saves to."""

    rank: int
    ranks: int
    """Number of ranks."""
    store: "Store"
    """Key-value store of all ranks."""
    folder: Path
    """Folder for checkpoints, empty at first; the same on all ranks."""


class Saver:
    """Base class of savers; its default methods suit a saver that blocks until it is done."""

    can_restore = True
    """Whether the saver can restore states."""

    def __init__(self, states: SavedStates, place: Place) -> None:
        self._states, self._place = states, place

    def save(self, step: int) -> None:
        """Save the current states, or start to save them."""
        raise NotImplementedError

    def fence(self) -> None:
        """Wait until the states may change."""

    def is_durable(self) -> bool:
        """Return whether the last checkpoint is known to be on disk and complete on all ranks."""
        return True

    def settle(self) -> None:
        """Wait until all work on the last checkpoint is done."""

    def restore(self) -> None:
        """Load the last checkpoint into the states."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources."""


class Ours(Saver):
    """The saver of frontier_llm.checkpoint."""

    def __init__(
        self, states: SavedStates, place: Place, mode: Literal["blocking", "lazy"]
    ) -> None:
        super().__init__(states, place)
        self._step = 0
        self._manager = CheckpointManager(
            place.folder, place.rank, place.ranks, place.store, mode, 1, TIMEOUT,
            Options(ranks_on_host=place.ranks),
        )  # fmt: skip
        self._manager.prepare(states.shards)

    def save(self, step: int) -> None:
        """Start a checkpoint after the previous one is complete."""
        self._step = step
        self._manager.begin(step, self._states.shards, {})

    def fence(self) -> None:
        """Copy all parts of the states that are not written yet."""
        self._manager.fence()

    def is_durable(self) -> bool:
        """Return whether the folder has its final name or, on other ranks, the commit is known.

        The thread of rank 0 gives the folder its final name, and then deletes the previous one.
        """
        if self._place.rank == 0:
            return (self._place.folder / step_folder(self._step)).exists()
        return not self._manager.is_writing

    def settle(self) -> None:
        """Wait for the commit."""
        self._manager.fence()
        self._manager.wait()

    def restore(self) -> None:
        """Load the newest checkpoint with its digests verified."""
        checkpoint = newest(self._place.folder)
        assert checkpoint is not None
        load(checkpoint, self._states.shards)


class TorchSave(Saver):
    """torch.save of a rank's tensors to one file per rank, followed by a barrier."""

    def __init__(self, states: SavedStates, place: Place, *, sync: bool) -> None:
        super().__init__(states, place)
        self._sync = sync
        self._path = place.folder / "none"

    def save(self, step: int) -> None:
        """Write this rank's file and delete the previous one."""
        previous = self._path
        self._path = self._place.folder / f"step_{step}_rank_{self._place.rank}.pt"
        torch.save(self._states.tensors, self._path)
        if self._sync:
            sync_file(self._path)
        dist.barrier()
        previous.unlink(missing_ok=True)

    def is_durable(self) -> bool:
        """Return whether files are synced; if not, the time until durable is unknown."""
        return self._sync

    def restore(self) -> None:
        """Read the file into new tensors and copy them to the states."""
        saved = torch.load(self._path, weights_only=True)
        for name, tensor in self._states.tensors.items():
            tensor.copy_(saved[name])


class Dcp(Saver):
    """torch.distributed.checkpoint.save, which syncs its files and writes its metadata last."""

    def __init__(self, states: SavedStates, place: Place) -> None:
        super().__init__(states, place)
        self._path = self._previous = place.folder / "none"

    def save(self, step: int) -> None:
        """Write a folder and delete the previous one."""
        self._next(step)
        dcp.save(self._states.tensors, checkpoint_id=self._path)
        self._delete_previous()

    def restore(self) -> None:
        """Read directly into the states."""
        dcp.load(self._states.tensors, checkpoint_id=self._path)

    def _next(self, step: int) -> None:
        self._previous, self._path = self._path, self._place.folder / f"step_{step}"

    def _delete_previous(self) -> None:
        if self._place.rank == 0 and self._previous.is_dir():
            shutil.rmtree(self._previous)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, which writes in a thread.

    By default async_save copies the states before it returns. With a DefaultStager a thread copies
    them, into memory that is reused by the next save, and the fence waits for that copy.
    """

    def __init__(self, states: SavedStates, place: Place, *, stager: bool) -> None:
        super().__init__(states, place)
        self._group = dist.new_group(
            backend="gloo", timeout=TIMEOUT
        )  # used by the saving thread only
        options = StagingOptions(
            use_pinned_memory=False,  # pinned memory and non-blocking copies need a GPU
            use_non_blocking_copy=False,
            use_shared_memory=False,
            use_async_staging=True,
        )
        self._stager = DefaultStager(options) if stager else None
        self._copied: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Start a checkpoint after the previous one is complete."""
        self.settle()
        self._next(step)
        response: Any = dcp.async_save(
            self._states.tensors,
            checkpoint_id=self._path,
            process_group=self._group,
            async_stager=self._stager,
        )
        if self._stager is None:
            self._written = response
        else:
            self._copied, self._written = response.staging_completion, response.upload_completion

    def fence(self) -> None:
        """Wait for the copy."""
        if self._copied is not None:
            self._copied.result()

    def is_durable(self) -> bool:
        """Return whether the saving thread has finished."""
        return self._written is None or self._written.done()

    def settle(self) -> None:
        """Wait for the saving thread and delete the previous checkpoint."""
        if self._written is not None:
            self._written.result()
            self._written = None
            self._delete_previous()

    def close(self) -> None:
        """End the stager's thread."""
        if self._stager is not None:
            self._stager.close()


class BareWrites(Saver):
    """A thread that writes the same number of bytes as a saver, from one buffer.

    It copies no states and computes no digests, so its cost is a lower bound for every saver that
    writes as fast.
    """

    can_restore = False

    def __init__(self, states: SavedStates, place: Place) -> None:
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
        """Return whether the thread has finished."""
        return self._thread is None or not self._thread.is_alive()

    def settle(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        blocks = -(-self._states.size // disk.BLOCK_BYTES)
        disk.write_blocks(self._path, self._buffer, blocks)


SAVERS: dict[str, tuple[str, Callable[[SavedStates, Place], Saver]]] = {
    "ours-lazy": ("checkpoint=lazy", lambda s, p: Ours(s, p, "lazy")),
    "ours-blocking": ("checkpoint=blocking", lambda s, p: Ours(s, p, "blocking")),
    "torch.save": ("torch.save, not synced", lambda s, p: TorchSave(s, p, sync=False)),
    "torch.save-fsync": ("torch.save, fsync", lambda s, p: TorchSave(s, p, sync=True)),
    "dcp": ("torch.distributed.checkpoint.save", Dcp),
    "dcp-async": ("its async_save", lambda s, p: DcpAsync(s, p, stager=False)),
    "dcp-async-stager": (
        "its async_save with one DefaultStager for all saves",
        lambda s, p: DcpAsync(s, p, stager=True),
    ),
    "bare-writes": ("as many bytes from one buffer", BareWrites),
}
"""Description and constructor of each saver, by name."""
