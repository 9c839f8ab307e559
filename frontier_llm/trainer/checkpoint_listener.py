"""What is told about the checkpoints of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint in the run directory that is complete on disk."""

    step: int
    """Number of optimizer steps done."""
    folder: Path
    """Folder of the checkpoint. It may be deleted later, when newer checkpoints replace it, or be
    renamed, when the run goes back to an earlier step."""


class CheckpointListener(Protocol):
    """An object that is told about checkpoints in the run directory.

    It is called on the main thread of every rank.
    """

    def on_checkpoint_begin(self, step: int) -> None:
        """Run before a checkpoint begins to be written."""

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Run when all ranks know that a checkpoint is committed."""
