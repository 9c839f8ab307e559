"""One checkpoint from the first byte to the commit, as each rank goes through it.

step_N.partial/   every rank writes and syncs its file, and reports its size and digests
manifest.json     rank 0 writes and syncs it when all have
step_N/           rank 0 renames the folder: from here on, and only from here on, it exists

Where each node has a folder of its own, rank 0 decides for all as above, with its own node's
folder; then the first rank of each other node writes its node's manifest and renames that one.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.commit import Ballot, UndecidedError
from frontier_llm.checkpoint.durable import remove_folder, sync_folder
from frontier_llm.checkpoint.faults import reach
from frontier_llm.checkpoint.manifest import File, FilePart, Manifest, RankRecord
from frontier_llm.checkpoint.names import MANIFEST, partial_folder, step_folder
from frontier_llm.checkpoint.plan import Plan
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.errors import CheckpointError, FrontierError


class UnfollowedError(CheckpointError):
    """A checkpoint was committed that this node has not got; no other rank knows of it."""


@dataclass(frozen=True)
class Task:
    """One checkpoint to be written."""

    folder: Path
    """Of all checkpoints of the run."""
    step: int
    """Optimizer steps done."""
    meta: dict[str, Any]
    """Goes into the manifest; rank 0's counts."""
    rank: int
    """Of this process."""
    plan: Plan
    """What this rank writes."""
    sharing: range
    """The ranks that share the folder: all, or those of this rank's node."""
    repeats: bool
    """Whether ranks also write what another one writes: a node's folder holds all of its own."""

    @property
    def leads(self) -> bool:
        """Whether this rank gives the folder its name."""
        return self.rank == self.sharing.start

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return self.folder / partial_folder(self.step)

    @property
    def final(self) -> Path:
        """Where it is found."""
        return self.folder / step_folder(self.step)


def save(task: Task, snapshot: Snapshot, ballot: Ballot) -> None:
    """Write this rank's part and return when the checkpoint is committed.

    Every rank calls this, on any thread.

    Raises:
        CheckpointError: on every rank, with the first rank's cause; this rank's file is removed.
    """
    path = task.partial / task.plan.name
    try:
        _write_and_vote(task, snapshot, ballot)
        if task.rank == 0:
            _commit(task, ballot)
        else:
            ballot.wait_for_end()
            if task.leads:
                _follow(task, ballot)
    except UndecidedError:
        raise  # if rank 0 lives, it may still rename the folder: leave the file in it
    except FrontierError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            task.partial.rmdir()  # the last rank succeeds
        raise


def _write_and_vote(task: Task, snapshot: Snapshot, ballot: Ballot) -> None:
    try:
        record = task.plan.record(_write(task, snapshot))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        cause = f"rank {task.rank}: {_words(error)}"
        with contextlib.suppress(RuntimeError):  # the store is gone: they will notice
            cause = ballot.refuse(cause) or cause
            if task.rank == 0:
                ballot.conclude(cause)
        raise CheckpointError(cause) from error
    finally:
        snapshot.close()
    ballot.arrive(record.model_dump_json())
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


def _commit(task: Task, ballot: Ballot) -> None:
    """Make the checkpoint exist, and tell the other ranks that it does, or why not."""
    try:
        records = ballot.gather()
        _complete(task, [records[rank] for rank in task.sharing])
        ballot.seal()
        reach("sealed", task.rank)
        _rename(task)
    except Exception as error:
        cause = _words(error)
        with contextlib.suppress(RuntimeError):
            cause = ballot.refuse(cause) or cause
            ballot.conclude(cause)
        raise CheckpointError(cause) from error
    reach("renamed", task.rank)
    ballot.conclude()
    reach("concluded", task.rank)


def _follow(task: Task, ballot: Ballot) -> None:
    """Name this node's folder too, after rank 0 has decided and named its own.

    Raises:
        UnfollowedError: on this rank alone: the node lacks this checkpoint, so nobody will use it.
    """
    try:
        _complete(task, ballot.records(task.sharing))
        _rename(task)
    except Exception as error:
        raise UnfollowedError(f"rank {task.rank}: {_words(error)}") from error


def _complete(task: Task, records: Sequence[str]) -> None:
    """See that all files of this folder are there, and write the manifest beside them."""
    read = [RankRecord.model_validate_json(record) for record in records]
    manifest = Manifest.merged(
        task.step, task.plan.chunk_bytes, read, task.meta, repeats=task.repeats
    )
    task.partial.mkdir(parents=True, exist_ok=True)
    _check_files(task.partial, manifest.files)
    _write_manifest(task, manifest.to_bytes())


def _check_files(partial: Path, files: Mapping[str, File]) -> None:
    """See that what the ranks wrote is here, and remove what an earlier attempt left."""
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
    """Give the folder its final name; a checkpoint of the same step makes way first."""
    replaced = task.final.with_name(f"{task.final.name}.replaced")
    if task.final.exists():
        if replaced.exists():
            remove_folder(replaced)
        task.final.rename(replaced)
    task.partial.rename(task.final)
    sync_folder(task.folder)
    with contextlib.suppress(OSError):  # it is committed, whatever becomes of the other
        remove_folder(replaced)


def _words(error: Exception) -> str:
    if isinstance(error, FrontierError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"
