"""Write and commit one checkpoint, as seen from each rank.

    step_N.partial/   every rank writes and syncs its file, and reports its size and digests
    manifest.json     rank 0 writes and syncs it after all ranks have reported
    step_N/           rank 0 renames the folder; only now the checkpoint exists

With one folder per node (node-local disks), rank 0 decides for all nodes as above and completes
its own node's folder; then the first rank of each other node writes its node's manifest and
renames its node's folder. `commit_barrier` lists the states of a checkpoint.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.commit_barrier import CommitBarrier, UnknownOutcomeError
from frontier_llm.checkpoint.folders import (
    MANIFEST,
    partial_folder,
    remove_folder,
    step_folder,
    sync_folder,
)
from frontier_llm.checkpoint.kill_points import reach
from frontier_llm.checkpoint.manifest import File, FilePart, Manifest, RankRecord
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.checkpoint.write_plan import WritePlan
from frontier_llm.errors import CheckpointError, FrontierError


class NodeCommitError(CheckpointError):
    """This node could not complete its folder of a checkpoint that rank 0 has committed.

    Only the first rank of the node raises it; other ranks are not told.
    """


@dataclass(frozen=True)
class Task:
    """One checkpoint to be written."""

    folder: Path
    """Folder of all checkpoints of the run."""
    step: int
    """Number of optimizer steps done."""
    meta: dict[str, Any]
    """Plain JSON for the manifest; a folder gets that of its first rank."""
    rank: int
    """Rank of this process."""
    plan: WritePlan
    """Layout of this rank's file."""
    folder_ranks: range
    """Ranks that write into the same folder: all ranks, or those of this rank's node."""
    repeats: bool
    """Whether elements may be stored more than once, as with one folder per node."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its folder, which writes the manifest and renames."""
        return self.rank == self.folder_ranks.start

    @property
    def partial(self) -> Path:
        """Path of the checkpoint until it is committed."""
        return self.folder / partial_folder(self.step)

    @property
    def final(self) -> Path:
        """Path of the committed checkpoint."""
        return self.folder / step_folder(self.step)


def save(task: Task, snapshot: Snapshot, barrier: CommitBarrier) -> None:
    """Write this rank's file and return when the checkpoint is committed.

    Every rank calls this, on any thread.

    Raises:
        CheckpointError: the checkpoint failed, on every rank with the first cause; this rank's
            file is removed.
    """
    path = task.partial / task.plan.name
    try:
        _write_and_arrive(task, snapshot, barrier)
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
            task.partial.rmdir()  # fails on all ranks but the last
        raise


def _write_and_arrive(task: Task, snapshot: Snapshot, barrier: CommitBarrier) -> None:
    try:
        record = task.plan.record(_write(task, snapshot))
    except Exception as error:  # abort after every error: the other ranks wait for this one
        cause = f"rank {task.rank}: {_describe(error)}"
        with contextlib.suppress(RuntimeError):  # the store is lost; the others find out themselves
            cause = barrier.abort(cause) or cause
            if task.rank == 0:
                barrier.conclude(cause)
        raise CheckpointError(cause) from error
    finally:
        snapshot.close()
    barrier.arrive(record.to_json())
    reach("reported", task.rank)


def _write(task: Task, snapshot: Snapshot) -> FilePart | None:
    plan, rank = task.plan, task.rank
    if not plan.chunks:
        return None
    with RankFile(task.partial / plan.name, plan.size, plan.at, plan.total) as file:
        reach("file.created", rank)
        for index, (buffer, size) in enumerate(snapshot.chunks()):
            if index == len(plan.chunks) // 2:
                reach("file.half", rank)
            file.write(buffer, size)
        reach("file.written", rank)
        done = file.finish()
        reach("file.synced", rank)
    return done


def _commit(task: Task, barrier: CommitBarrier) -> None:
    """Commit the checkpoint and publish the outcome. Rank 0 only."""
    try:
        records = barrier.wait_for_ranks()
        _complete(task, [records[rank] for rank in task.folder_ranks])
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
    """Complete and rename this node's folder, after rank 0 has committed its own.

    Raises:
        NodeCommitError: this node's folder is not complete, so no run will resume from this
            checkpoint.
    """
    try:
        _complete(task, barrier.records(task.folder_ranks))
        _rename(task)
    except Exception as error:
        raise NodeCommitError(f"rank {task.rank}: {_describe(error)}") from error


def _complete(task: Task, records: Sequence[str]) -> None:
    """Check that the folder has all files, and write the manifest into it."""
    parsed = [RankRecord.model_validate_json(record) for record in records]
    manifest = Manifest.merged(
        task.step, task.plan.chunk_bytes, parsed, task.meta, repeats=task.repeats
    )
    task.partial.mkdir(parents=True, exist_ok=True)
    _check_files(task.partial, manifest.files)
    _write_manifest(task, manifest.to_bytes())


def _check_files(partial: Path, files: Mapping[str, File]) -> None:
    """Check that all written files are in the folder, and remove those of an earlier attempt."""
    here = {path.name: path.stat().st_size for path in partial.iterdir()}
    for name, file in files.items():
        if here.get(name) != file.size:
            found = f"has {here[name]} bytes" if name in here else "is not there"
            raise CheckpointError(
                f"rank 0 cannot see what another rank wrote: {partial / name} {found} and should "
                f"have {file.size}; run.dir must be on a file system that all nodes share"
            )
    for name in here.keys() - files.keys():
        (partial / name).unlink()


def _write_manifest(task: Task, content: bytes) -> None:
    middle = len(content) // 2
    with (task.partial / MANIFEST).open("wb") as stream:
        stream.write(content[:middle])
        stream.flush()
        reach("manifest.half", task.rank)
        stream.write(content[middle:])
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(task.partial)
    reach("manifest.synced", task.rank)


def _rename(task: Task) -> None:
    """Give the folder its final name; an existing checkpoint of the same step is replaced."""
    replaced = task.final.with_name(f"{task.final.name}.replaced")
    if task.final.exists():
        if replaced.exists():
            remove_folder(replaced)
        task.final.rename(replaced)
    task.partial.rename(task.final)
    sync_folder(task.folder)
    with contextlib.suppress(OSError):  # the new checkpoint is committed whether or not this works
        remove_folder(replaced)


def _describe(error: Exception) -> str:
    if isinstance(error, FrontierError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"
