"""Write this rank's file of the run directory from the checkpoint on the disk of its node."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from frontier_llm.checkpoint.cancellation import Cancellation
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.pacer import Pacer
from frontier_llm.checkpoint.stored_chunks import StoredChunks
from frontier_llm.checkpoint.write_plan import WritePlan
from frontier_llm.errors import CheckpointError

_POLL_SECONDS = 0.02


class DrainSource:
    """The content of a rank's file, read from its node's disk when the first chunk is wanted."""

    def __init__(
        self,
        plan: WritePlan,
        node_folder: Path,
        step: int,
        buffers: tuple[torch.Tensor, torch.Tensor],
        pacer: Pacer,
        timeout: timedelta,
    ) -> None:
        self._plan, self._folder, self._step = plan, node_folder, step
        self._buffers, self._pacer, self._timeout = buffers, pacer, timeout

    def chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks; raise a CheckpointError if the source is absent or damaged."""
        folder, cancellation = self._folder, self._pacer.cancellation
        checkpoint = open_when_committed(folder, self._step, self._timeout, cancellation)
        yield from StoredChunks(self._plan, checkpoint, self._buffers, self._pacer).chunks()

    def close(self) -> None:
        """Do nothing: the buffers belong to the caller."""


def open_when_committed(
    folder: Path, step: int, timeout: timedelta, cancellation: Cancellation
) -> Checkpoint:
    """Open a checkpoint that rank 0 has committed; another rank of this node may still rename it.

    Raises:
        CheckpointError: the checkpoint is absent or damaged, or was given up.
    """
    path = folder / step_folder(step)
    deadline = time.monotonic() + timeout.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(f"{path} is absent, although its step is committed")
        cancellation.sleep(_POLL_SECONDS)
    return Checkpoint.open(path)
