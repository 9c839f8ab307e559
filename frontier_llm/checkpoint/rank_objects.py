"""Python objects that ranks exchange at the start of a run. All ranks call these functions."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import SplitManifest
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import StateShard

T = TypeVar("T")


def of_rank_0(compute: Callable[[], T]) -> T:
    """Call a function on rank 0; return its result, or raise its CheckpointError, on every rank."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            results = [compute()]
        except CheckpointError as error:
            results = [error]
    dist.broadcast_object_list(results, src=0)
    (result,) = results
    if isinstance(result, CheckpointError):
        raise result
    return cast(T, result)


def gathered(own: Any) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def opened_by_rank_0(
    open_checkpoint: Callable[[], Checkpoint | None], names: Iterable[str]
) -> tuple[Checkpoint, SplitManifest] | None:
    """Open a checkpoint on rank 0, and return on every rank what it needs of it.

    Opening a checkpoint asks the file system for the size of every file. If thousands of ranks did
    so, a shared file system would get millions of requests. Returns the checkpoint, whose manifest
    has only the tensors with these names, and its whole manifest, not parsed; None if rank 0 has
    found none. Raises a CheckpointError if rank 0 cannot open it.
    """

    def content() -> tuple[Path, SplitManifest] | None:
        checkpoint = open_checkpoint()
        if checkpoint is None:
            return None
        return checkpoint.folder, SplitManifest.of(checkpoint.manifest)

    found = of_rank_0(content)
    return found and (Checkpoint(found[0], found[1].part(names)), found[1])


def tensor_names(shards: Iterable[StateShard]) -> set[str]:
    """Return the names of the global tensors of which shards are parts."""
    return {placement.name for shard in shards for placement in shard.record.placements}
