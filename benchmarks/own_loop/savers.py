"""The savers of bench_library.py: a training loop with checkpoints, and its blocked time.

`library` is `frontier_llm.library.Checkpoints` of sharded states. The others save the FSDP2 model
and its optimizer with torch.distributed.checkpoint (DCP), in the same number of bytes.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.own_loop.llama import Shape
from benchmarks.own_loop.loops import FsdpLoop, LibraryLoop, Precision
from frontier_llm.library import Checkpoints

TIMEOUT = timedelta(seconds=120)
"""Time limit of the collectives of a save."""
DcpMode = Literal["save", "async", "async-stager"]


class Saver(Protocol):
    """One rank of a training loop that saves its states."""

    def step(self, tokens: torch.Tensor, *, is_due: bool) -> None:
        """Run a step, and save the states after it, or start to, if a save is due. Collective."""

    def settle(self) -> None:
        """Wait until the last save is complete; this time is not counted as blocked."""

    def take_blocked_seconds(self) -> float:
        """Return for how long saves have blocked the loop since the last call."""

    def close(self) -> None:
        """Release all resources."""


class LibrarySaver:
    """The library's lazy checkpoints, which a thread writes."""

    def __init__(self, shape: Shape, precision: Precision, folder: Path) -> None:
        self._loop = LibraryLoop(shape, precision)
        self._checkpoints = Checkpoints(folder, self._loop.states, keep=1)
        self._step, self._blocked = 0, 0.0

    def step(self, tokens: torch.Tensor, *, is_due: bool) -> None:
        """Run a step; see `Saver`. The update waits for the copies of the previous save."""
        self._step += 1
        self._loop.step(tokens, saved=is_due)
        if is_due:
            self._checkpoints.save(self._step)

    def settle(self) -> None:
        """Wait for the commit."""
        self._blocked += self._checkpoints.take_stall_seconds()
        self._checkpoints.close()
        self._checkpoints.take_stall_seconds()

    def take_blocked_seconds(self) -> float:
        """Return the stall that the library counts: planning, waits and copies."""
        blocked, self._blocked = self._blocked + self._checkpoints.take_stall_seconds(), 0.0
        return blocked

    def close(self) -> None:
        """Wait for the commit."""
        self._checkpoints.close()


class DcpSaver:
    """DCP of an FSDP2 model and optimizer.

    `save` writes before it returns. `async` copies the states before it returns, and a thread
    writes the copy. With `async-stager` another thread makes the copy, in memory that the next save
    reuses, and the update waits for that copy.
    """

    def __init__(self, shape: Shape, precision: Precision, folder: Path, mode: DcpMode) -> None:
        self._loop = FsdpLoop(shape, precision)
        self._folder, self._mode, self._saves, self._blocked = folder, mode, 0, 0.0
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for the saving thread
        options = StagingOptions(
            use_pinned_memory=False,  # pinned memory and non-blocking copies need a GPU
            use_non_blocking_copy=False,
            use_shared_memory=False,
            use_async_staging=True,
        )
        self._stager = DefaultStager(options) if mode == "async-stager" else None
        self._copied: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def step(self, tokens: torch.Tensor, *, is_due: bool) -> None:
        """Run a step; see `Saver`."""
        self._loop.passes(tokens)
        if self._copied is not None:
            with self._blocking():
                self._copied.result()
                self._copied = None
        self._loop.update()
        if is_due:
            with self._blocking():
                self._save()

    def settle(self) -> None:
        """Wait for the saving thread."""
        if self._written is not None:
            self._written.result()
            self._written = None

    def take_blocked_seconds(self) -> float:
        """Return the time of the calls of DCP and of the waits for its threads."""
        blocked, self._blocked = self._blocked, 0.0
        return blocked

    def close(self) -> None:
        """End the thread of the stager."""
        self.settle()
        if self._stager is not None:
            self._stager.close()

    def _save(self) -> None:
        self.settle()  # DCP allows one asynchronous save at a time
        self._saves += 1
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        states = {"model": model, "optimizer": optimizer}
        path = self._folder / str(self._saves)
        if self._mode == "save":
            dcp.save(states, checkpoint_id=path)
            return
        response: Any = dcp.async_save(
            states, checkpoint_id=path, process_group=self._group, async_stager=self._stager
        )
        if self._stager is None:
            self._written = response
        else:
            self._copied, self._written = response.staging_completion, response.upload_completion

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._blocked += time.perf_counter() - start


SAVERS = ("library", "dcp-save", "dcp-async", "dcp-async-stager")
"""Names of the savers."""
_DCP_MODES: dict[str, DcpMode] = {
    "dcp-save": "save",
    "dcp-async": "async",
    "dcp-async-stager": "async-stager",
}


def make_saver(name: str, shape: Shape, precision: Precision, folder: Path) -> Saver:
    """Build one rank of a saver. Collective over all ranks.

    Args:
        name: one of `SAVERS`.
        shape: the model.
        precision: of the computation.
        folder: an empty folder for its checkpoints, the same on all ranks.
    """
    if name == "library":
        return LibrarySaver(shape, precision, folder)
    return DcpSaver(shape, precision, folder, _DCP_MODES[name])
