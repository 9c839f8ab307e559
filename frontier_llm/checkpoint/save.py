"""Write and commit one checkpoint, as seen from each rank.

1. Every rank writes its file into the folder `step_N.partial`, syncs it, and reports its size and
   digests to rank 0.
2. When all ranks have reported, rank 0 writes and syncs `manifest.json` in this folder.
3. Rank 0 renames the folder to `step_N`. Only now the checkpoint exists.

With node-local disks, each node has its own folder. Rank 0 does steps 2 and 3 for its own node, and
thereby decides for all nodes. Then the first rank of each other node does steps 2 and 3 for its
node. `commit_barrier` is the part in which the ranks agree.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from frontier_llm.atomic_files import sync
from frontier_llm.checkpoint.commit_barrier import CommitBarrier, UnknownOutcomeError
from frontier_llm.checkpoint.folders import (
    MANIFEST,
    partial_folder,
    remove_folder,
    step_folder,
)
from frontier_llm.checkpoint.kill_points import reach
from frontier_llm.checkpoint.manifest import File, FilePart, Manifest, Moments, RankRecord
from frontier_llm.checkpoint.pacer import Cancellation
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.checkpoint.write_plan import FilePlan
from frontier_llm.errors import CheckpointError, FrontierError
from frontier_llm.units import format_bytes

_log = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """The content of a rank's file: a snapshot of states, or a generator that reads a copy."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the chunks of the file in order: (buffer, size of the chunk in bytes).

        The buffer is [chunk_bytes] uint8 on the host, page-aligned, valid until the next chunk.
        """

    def close(self) -> None:
        """Free what the source occupies."""


class NodeCommitError(CheckpointError):
    """This node could not complete its folder of a checkpoint that rank 0 has committed.

    Only the first rank of the node raises it. The other ranks do not learn of it.
    """


@dataclass(frozen=True)
class Task:
    """One checkpoint to be written."""

    folder: Path
    step: int
    meta: dict[str, Any]
    """Values for the manifest, as JSON. The first rank of each folder writes them, so
    they should be equal on all ranks."""
    rank: int
    plan: FilePlan
    folder_ranks: range
    """Ranks that write into the same folder: all ranks, or those of this rank's node."""
    repeats: bool
    """Whether elements may be stored more than once, as with one folder per node."""
    moments: Moments | None = None
    """Format in which Adam's moments are stored; None: fp32."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Ends the writing before all ranks have written."""
    continues: bool = False
    """Whether the file may hold chunks of an earlier attempt, which need not be written again."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the manifest and renames the folder."""
        return self.rank == self.folder_ranks.start

    @property
    def partial(self) -> Path:
        """Path of the checkpoint until it is committed."""
        return self.folder / partial_folder(self.step)

    @property
    def final(self) -> Path:
        """Path of the committed checkpoint."""
        return self.folder / step_folder(self.step)


def save(task: Task, source: ChunkSource, barrier: CommitBarrier) -> None:
    """Write this rank's file and return when the checkpoint is committed.

    Every rank calls this, on any thread. The source is closed when the file is written. If the
    checkpoint failed, all ranks raise a CheckpointError with the first cause, and remove their
    files. With an UnknownOutcomeError (rank 0 or the store is lost) this rank keeps its file.
    """
    path = task.partial / task.plan.name
    try:
        _write_and_arrive(task, source, barrier)
        if task.rank == 0:
            _commit(task, barrier)
        else:
            barrier.wait_for_outcome()
            if task.is_first:
                _complete_node(task, barrier)
    except UnknownOutcomeError:
        raise  # keep the file: if rank 0 is alive, it may still rename the folder
    except FrontierError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            task.partial.rmdir()  # fails if another rank has not removed its file yet
        raise


def _write_and_arrive(task: Task, source: ChunkSource, barrier: CommitBarrier) -> None:
    try:
        record = task.plan.record(write_file(task, source))
    except Exception as error:  # any error must abort: the other ranks wait for this one
        cause = f"rank {task.rank}: {_describe(error)}"
        with contextlib.suppress(RuntimeError):  # the store is lost, as the other ranks will notice
            cause = barrier.abort(cause) or cause
            if task.rank == 0:
                barrier.conclude(cause)
        raise CheckpointError(cause) from error
    finally:
        source.close()
    barrier.arrive(record.to_json())
    reach("reported", task.rank)


def write_file(task: Task, source: ChunkSource) -> FilePart | None:
    """Write and sync this rank's file; return None if the rank has nothing to save.

    If the file cannot be written, it is removed and a CheckpointError is raised.
    """
    plan, rank = task.plan, task.rank
    if not plan.size:
        return None
    path = task.partial / plan.name
    continues = task.continues
    with RankFile(path, plan.size, plan.offset_bytes, plan.total, continues=continues) as file:
        reach("file.created", rank)
        for index, (buffer, size) in enumerate(source):
            task.cancellation.check()
            if index == plan.chunk_count // 2:
                reach("file.half", rank)
            file.write(buffer, size)
        reach("file.written", rank)
        part = file.finish()
        reach("file.synced", rank)
    if file.kept_bytes:
        kept, all_ = format_bytes(file.kept_bytes), format_bytes(plan.size)
        _log.info("%s of %s of %s were there from an earlier attempt", kept, all_, path)
    return part


def _commit(task: Task, barrier: CommitBarrier) -> None:
    try:
        records = barrier.wait_for_ranks()
        _write_folder_manifest(task, [records[rank] for rank in task.folder_ranks])
        barrier.seal()
        reach("sealed", task.rank)
        _rename(task)
    except Exception as error:
        cause = _describe(error)
        with contextlib.suppress(RuntimeError):
            cause = barrier.abort(cause) or cause
            barrier.conclude(cause)
        raise CheckpointError(cause) from error
    reach("renamed", task.rank)
    barrier.conclude()
    reach("concluded", task.rank)


def _complete_node(task: Task, barrier: CommitBarrier) -> None:
    """Write the manifest of this node's folder and rename it, after rank 0 has committed.

    After a NodeCommitError no run will resume from this checkpoint.
    """
    try:
        _write_folder_manifest(task, barrier.records(task.folder_ranks))
        _rename(task)
    except Exception as error:
        raise NodeCommitError(f"rank {task.rank}: {_describe(error)}") from error


def _write_folder_manifest(task: Task, records: Sequence[str]) -> None:
    parsed = [RankRecord.model_validate_json(record) for record in records]
    manifest = Manifest.merged(
        task.step, task.plan.chunk_bytes, parsed, task.meta,
        repeats=task.repeats, moments=task.moments,
    )  # fmt: skip
    task.partial.mkdir(parents=True, exist_ok=True)
    check_files(task.partial, manifest.files)
    write_manifest(task.partial, manifest, task.rank)


def _rename(task: Task) -> None:
    publish(task.folder, task.step)


def _describe(error: Exception) -> str:
    if isinstance(error, FrontierError):
        return error.reason
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"


def check_files(partial: Path, files: Mapping[str, File]) -> None:
    """Check that all written files are in the folder, and remove files of an earlier attempt.

    A CheckpointError is raised if a file is absent or has another size.
    """
    size_of = {path.name: path.stat().st_size for path in partial.iterdir()}
    for name, file in files.items():
        if size_of.get(name) != file.size:
            found = f"has {size_of[name]} bytes" if name in size_of else "is not there"
            raise CheckpointError(
                f"rank 0 cannot see what another rank wrote: {partial / name} {found} and should "
                f"have {file.size}; run.dir must be on a file system that all nodes share"
            )
    for name in size_of.keys() - files.keys():
        (partial / name).unlink()


def write_manifest(partial: Path, manifest: Manifest, rank: int) -> None:
    """Write the manifest in two halves, so that tests can kill the process between them."""
    content = manifest.to_bytes()
    middle = len(content) // 2
    with (partial / MANIFEST).open("wb") as stream:
        stream.write(content[:middle])
        stream.flush()
        reach("manifest.half", rank)
        stream.write(content[middle:])
        stream.flush()
        os.fsync(stream.fileno())
    sync(partial)
    reach("manifest.synced", rank)


def publish(folder: Path, step: int) -> None:
    """Give the folder its final name, and replace an existing checkpoint of the same step."""
    final = folder / step_folder(step)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if replaced.exists():
            remove_folder(replaced)
        final.rename(replaced)
    (folder / partial_folder(step)).rename(final)
    sync(folder)
    with contextlib.suppress(OSError):  # the new checkpoint is committed even if this fails
        remove_folder(replaced)
