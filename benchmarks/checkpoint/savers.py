"""Ways to save and restore a rank's states, with frontier_llm, torch or other libraries.

Every rank creates its saver and calls the same methods in the same order. A saver keeps one
checkpoint: when a newer one is complete, the previous one is deleted. One save may be unfinished at
a time, except with ours, which may begin the next one.
"""

import importlib
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.testbed import disk
from benchmarks.testbed.disk import sync_file
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.restore import load
from frontier_llm.checkpoint.writer import Options
from frontier_llm.protocols import StateShard

TIMEOUT = timedelta(seconds=120)
"""Time limit of collectives and of the commit of a checkpoint."""
DcpMode = Literal["save", "async", "async-stager"]


class SavedStates(Protocol):
    """States of one rank that a saver saves."""

    shards: list[StateShard]

    @property
    def tensors(self) -> dict[str, Any]:
        """The same as tensors, by a name that no other rank uses."""

    @property
    def size(self) -> int:
        """Size of all tensors in bytes."""


@dataclass(frozen=True)
class Place:
    """The rank on which a saver runs, and the folder it saves to, the same on all ranks."""

    rank: int
    ranks: int
    """Number of ranks."""
    store: dist.Store
    """Key-value store of all ranks."""
    folder: Path
    """Folder for checkpoints, empty at first."""


class Saver:
    """Base class of savers; its default methods suit a saver that blocks until it is done."""

    can_restore = True

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
    """The saver of frontier_llm.checkpoint; `meta` is stored with each checkpoint."""

    def __init__(self, states: SavedStates, place: Place, manager: CheckpointManager) -> None:
        super().__init__(states, place)
        self._manager, self._step = manager, 0
        self.meta: dict[str, Any] = {}

    def save(self, step: int) -> None:
        """Start a checkpoint after the previous one is complete."""
        self._step = step
        self._manager.begin(step, self._states.shards, self.meta)

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

    def __init__(self, states: SavedStates, place: Place, *, sync: bool = True) -> None:
        super().__init__(states, place)
        self._sync = sync
        self._path = place.folder / "none"

    def save(self, step: int) -> None:
        """Write this rank's file; when all ranks have theirs, delete the previous one."""
        self._write(step, self._states.tensors, None)

    def is_durable(self) -> bool:
        """Return whether files are synced; if not, the time until durable is unknown."""
        return self._sync

    def restore(self) -> None:
        """Read the file into new tensors and copy them to the states."""
        saved = torch.load(self._path, weights_only=True)
        for name, tensor in self._states.tensors.items():
            tensor.copy_(saved[name])

    def _write(self, step: int, tensors: dict[str, torch.Tensor], group: Any) -> None:
        previous = self._path
        self._path = self._place.folder / f"step_{step}_rank_{self._place.rank}.pt"
        torch.save(tensors, self._path)
        if self._sync:
            sync_file(self._path)
        dist.barrier(group)
        previous.unlink(missing_ok=True)


class Dcp(Saver):
    """torch.distributed.checkpoint, which syncs its files and writes its metadata last.

    `save` writes before it returns. `async` copies the states before it returns, and a thread
    writes the copy. With `async-stager` another thread makes the copy, in memory that the next save
    reuses, and the fence waits for that copy. Collective over all ranks. The previous folder is
    deleted, unless it is to be kept.
    """

    def __init__(
        self, states: SavedStates, place: Place, mode: DcpMode, *, keeps_all: bool = False
    ) -> None:
        super().__init__(states, place)
        self._blocks, self._keeps_all = mode == "save", keeps_all
        self._path = self._previous = place.folder / "none"
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for the saving thread only
        options = StagingOptions(
            use_pinned_memory=False,  # pinned memory and non-blocking copies need a GPU
            use_non_blocking_copy=False,
            use_shared_memory=False,
            use_async_staging=True,
        )
        self._stager = DefaultStager(options) if mode == "async-stager" else None
        self._copied: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Start a checkpoint after the previous one is complete."""
        self.settle()
        self._previous, self._path = self._path, self._place.folder / f"step_{step}"
        if self._blocks:
            dcp.save(self._states.tensors, checkpoint_id=self._path)
            self.settle()
            return
        response: Any = dcp.async_save(
            self._states.tensors, checkpoint_id=self._path, process_group=self._group,
            async_stager=self._stager,
        )  # fmt: skip
        if self._stager is None:
            self._written = response
        else:
            self._copied, self._written = response.staging_completion, response.upload_completion

    def fence(self) -> None:
        """Wait for the copy."""
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def is_durable(self) -> bool:
        """Return whether the saving thread has finished."""
        return self._written is None or self._written.done()

    def settle(self) -> None:
        """Wait for the saving thread and delete the previous checkpoint."""
        if self._written is not None:
            self._written.result()
            self._written = None
        if self._place.rank == 0 and not self._keeps_all and self._previous.is_dir():
            shutil.rmtree(self._previous)

    def restore(self) -> None:
        """Read directly into the states."""
        dcp.load(self._states.tensors, checkpoint_id=self._path)

    def close(self) -> None:
        """End the stager's thread."""
        self.settle()
        if self._stager is not None:
            self._stager.close()


class _Background(Saver):
    """A saver whose thread finishes the save."""

    _thread: threading.Thread | None = None

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._thread = threading.Thread(target=work, args=arguments)
        self._thread.start()

    def is_durable(self) -> bool:
        """Return whether the thread has finished."""
        return self._thread is None or not self._thread.is_alive()

    def settle(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class TwoPhase(_Background, TorchSave):
    """A saver in two phases, like CheckFreq (Mohan et al., FAST 2021).

    The snapshot copies all states to host memory before training goes on. A thread then persists
    the copy with torch.save and fsync. The next snapshot waits for it.
    """

    def __init__(self, states: SavedStates, place: Place) -> None:
        super().__init__(states, place)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for the thread only
        self._copies: dict[str, torch.Tensor] = {}

    def save(self, step: int) -> None:
        """Copy the states, and start to write the copy."""
        self.settle()
        for name, tensor in self._states.tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor)
            self._copies[name].copy_(tensor)
        self._start(self._write, step, self._copies, self._group)


class TorchSnapshot(_Background):
    """torchsnapshot.Snapshot.async_take, whose files a thread syncs when it has finished."""

    def __init__(self, states: SavedStates, place: Place) -> None:
        super().__init__(states, place)
        self._module: Any = importlib.import_module("torchsnapshot")
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for the thread only
        self._path = place.folder / "none"

    def save(self, step: int) -> None:
        """Copy the states, and start to write the copy."""
        self.settle()
        previous, self._path = self._path, self._place.folder / f"step_{step}"
        states = self._module.StateDict(**self._states.tensors)
        pending = self._module.Snapshot.async_take(str(self._path), {"states": states})
        self._start(self._finish, pending, previous)

    def restore(self) -> None:
        """Read into new tensors and copy them to the states."""
        new = {name: torch.empty_like(tensor) for name, tensor in self._states.tensors.items()}
        states = self._module.StateDict(**new)
        self._module.Snapshot(str(self._path)).restore({"states": states})
        for name, tensor in self._states.tensors.items():
            tensor.copy_(states[name])

    def _finish(self, pending: Any, previous: Path) -> None:
        pending.wait()
        files = sorted(path for path in self._path.rglob("*") if path.is_file())
        for path in files[self._place.rank :: self._place.ranks]:
            sync_file(path)
        dist.barrier(self._group)
        if self._place.rank == 0:
            shutil.rmtree(previous, ignore_errors=True)


class BareWrites(_Background):
    """A thread that writes the same number of bytes as a saver, from one buffer.

    It copies no states and computes no digests, so its cost is a lower bound for every saver that
    writes as fast.
    """

    can_restore = False

    def __init__(self, states: SavedStates, place: Place) -> None:
        super().__init__(states, place)
        self._buffer = disk.filled_buffer()

    def save(self, step: int) -> None:
        """Overwrite the file."""
        self.settle()
        blocks = -(-self._states.size // disk.BLOCK_BYTES)
        path = self._place.folder / f"bare_{self._place.rank}"
        self._start(disk.write_blocks, path, self._buffer, blocks)


def _ours(states: SavedStates, place: Place, mode: Literal["blocking", "lazy"]) -> Ours:
    ranks = Ranks(place.rank, place.ranks, place.store, TIMEOUT)
    options = Options(ranks_on_host=place.ranks)
    manager = CheckpointManager(place.folder, ranks, mode, 1, options)
    manager.prepare(states.shards)
    return Ours(states, place, manager)


Maker = Callable[[Any, Place], Saver]
_DCP: dict[str, Maker] = {
    "dcp": lambda s, p: Dcp(s, p, "save"),
    "dcp-async": lambda s, p: Dcp(s, p, "async"),
    "dcp-async-stager": lambda s, p: Dcp(s, p, "async-stager"),
}
SAVERS: dict[str, Maker] = {
    "ours-lazy": lambda s, p: _ours(s, p, "lazy"),
    "ours-blocking": lambda s, p: _ours(s, p, "blocking"),
    "torch.save": lambda s, p: TorchSave(s, p, sync=False),
    "torch.save-fsync": TorchSave,
    **_DCP,
    "bare-writes": BareWrites,
}
"""Constructor of each saver of bench_checkpoint.py, by name."""
PEERS: dict[str, Maker] = {
    "torch.save": TorchSave,
    **_DCP,
    "two-phase": TwoPhase,
    "torchsnapshot": TorchSnapshot,
}
"""Constructor of each saver of checkpoint_in_training.py besides ours, by name."""
ASYNCHRONOUS = ("dcp-async", "dcp-async-stager", "two-phase", "torchsnapshot")
"""Peers that write while training continues."""
