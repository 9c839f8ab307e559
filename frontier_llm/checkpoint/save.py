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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.cancellation import Cancellation
from frontier_llm.checkpoint.chunk_source import ChunkSource, FilePlan
from frontier_llm.checkpoint.commit_barrier import CommitBarrier, UnknownOutcomeError
from frontier_llm.checkpoint.folder_commit import check_files, publish, write_manifest
from frontier_llm.checkpoint.folders import partial_folder, step_folder
from frontier_llm.checkpoint.kill_points import reach
from frontier_llm.checkpoint.manifest import FilePart, Manifest, Moments, RankRecord
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.errors import CheckpointError, FrontierError
from frontier_llm.units import format_bytes

_log = logging.getLogger(__name__)


class NodeCommitError(CheckpointError):
    """This node could not complete its folder of a checkpoint that rank 0 has committed.

    Only the first rank of the node raises it. The other ranks do not learn of it.
    """


@dataclass(frozen=True)
class Task:
    """One checkpoint to be written."""

    folder: Path
    """Folder of all checkpoints of the run."""
    step: int
    """Number of optimizer steps done."""
    meta: dict[str, Any]
    """Values for the manifest, as JSON. The first rank of each folder writes them, so
    they should be equal on all ranks."""
    rank: int
    """Rank of this process."""
    plan: FilePlan
    """Layout of this rank's file."""
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

    Every rank calls this, on any thread. The source is closed when the file is written.

    Raises:
        CheckpointError: the checkpoint failed. All ranks raise this error, with the first cause,
            and remove their files.
        UnknownOutcomeError: rank 0 or the store is lost, so this rank keeps its file.
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
    """Write this rank's file and report it to rank 0; after an error, abort the checkpoint."""
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
    if not plan.chunks:
        return None
    path = task.partial / plan.name
    continues = task.continues
    with RankFile(path, plan.size, plan.offset_bytes, plan.total, continues=continues) as file:
        reach("file.created", rank)
        for index, (buffer, size) in enumerate(source.chunks()):
            task.cancellation.check()
            if index == len(plan.chunks) // 2:
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
    """Commit the checkpoint and publish the outcome. Rank 0 only."""
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
    """Check that the folder has all files, and write the manifest from the records of its ranks."""
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
    """Return an error in one line, with the file and the cause."""
    if isinstance(error, FrontierError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"
