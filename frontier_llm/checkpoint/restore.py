"""Fill a rank's states from a checkpoint. Either side may have any parallel layout.

A chunk is the part of a file that has one digest. Only chunks that hold wanted elements are read.
If digests are compared, the whole chunk is read, otherwise only the bytes from its first to its
last wanted element.

In addition to the states, a rank needs memory for two chunks per place that is read. If another
layout saved the checkpoint, it also needs one byte per element of its largest shard, to detect
missing elements. Reduced moments are kept in their reduced form until all of them are read.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.range_reader import FileRange, ReadAhead
from frontier_llm.checkpoint.read_plan import FileCopy, plan_copies
from frontier_llm.checkpoint.stored_ranges import Shape
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord, Placement, StateShard


def load(
    checkpoint: Checkpoint,
    shards: Iterable[StateShard],
    verify: bool = True,
    is_only_reader: bool = True,
) -> None:
    """Load this rank's states, also those that another rank saves.

    If this rank is the only reader of its chunks on this host, reads bypass the page cache, which
    is faster. Otherwise the first rank that reads a chunk leaves it in the cache for the others.
    Raises the errors of `plan_copies`, and a CheckpointError that names a damaged file. Some states
    may then be overwritten.
    """
    copies = [copy for shard in shards for copy in _shard_copies(checkpoint, shard)]
    run_copies(copies, checkpoint, verify, is_only_reader)


def load_masters(checkpoint: Checkpoint, shards: Iterable[StateShard], verify: bool = True) -> None:
    """Load this rank's master weights and leave the moments unchanged; errors as for `load`."""
    copies: list[FileCopy] = []
    for shard in shards:
        if "master" in shard.states:
            targets = {"master": shard.master}
            copies += plan_copies(checkpoint, shard.record, shard.start, targets)
    run_copies(copies, checkpoint, verify)


def check_stored(checkpoint: Checkpoint, shards: Iterable[StateShard]) -> None:
    """Check that a checkpoint holds every element of some shards, without reading them.

    A node-local checkpoint may lack elements if the layout has changed since it was saved. Errors
    are those of `load`, except that damaged files are not detected.
    """
    for shard in shards:
        for _ in _shard_copies(checkpoint, shard):
            pass  # planning the copies raises the error


def check_model(folder: Path, weights: Collection[str], model: Collection[str]) -> None:
    """Reject a checkpoint with tensors that the model lacks. `load` alone would ignore them."""
    others: Sequence[str] = sorted(set(weights) - set(model))
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"{folder}: {others[0]}{more} is stored, the model has no such tensor; is "
            "it a checkpoint of another model?"
        )


def record_of_box(name: str, whole: Shape, start: Shape, shape: Shape) -> ParameterRecord:
    """Describe a box (a rectangular block) of a tensor of the model as a local parameter."""
    return ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit="",
        placements=(Placement(name, whole, start, (0,) * len(shape), shape),),
        group="matrices",
        counted=True,
        tensor_partial=False,
        tied=False,
    )


def run_copies(
    copies: Iterable[FileCopy],
    checkpoint: Checkpoint,
    verify: bool = True,
    is_only_reader: bool = True,
) -> None:
    """Run copies, sorted by file and chunk, so that each chunk is read once.

    Files in several places are read at the same time.
    """
    chunk_bytes, copies = checkpoint.manifest.chunk_bytes, list(copies)
    split = (part for copy in copies for part in copy.split(chunk_bytes))
    ordered = sorted(split, key=attrgetter("file", "offset_bytes"))
    by_chunk = groupby(ordered, key=lambda copy: (copy.file, copy.offset_bytes // chunk_bytes))
    groups = [list(group) for _, group in by_chunk]
    by_range = {_range_of(checkpoint, group, verify): group for group in groups}
    with ReadAhead(checkpoint, list(by_range), verify, bypass_cache=is_only_reader) as reader:
        for range_, content in reader:
            if isinstance(content, CheckpointError):
                raise content
            for copy in by_range[range_]:
                copy.run(content, range_.start)
    for copy in copies:
        copy.finish()


def _range_of(checkpoint: Checkpoint, group: Sequence[FileCopy], verify: bool) -> FileRange:
    """Return which bytes of the file must be read for copies from one chunk.

    To compare a digest, the whole chunk must be read. The copies are in the order of the file.
    """
    name, chunk_bytes = group[0].file, checkpoint.manifest.chunk_bytes
    if not verify:
        return FileRange(name, group[0].offset_bytes, max(copy.end for copy in group))
    start = group[0].offset_bytes // chunk_bytes * chunk_bytes
    return FileRange(name, start, min(start + chunk_bytes, checkpoint.manifest.files[name].size))


def _shard_copies(checkpoint: Checkpoint, shard: StateShard) -> Iterator[FileCopy]:
    return plan_copies(checkpoint, shard.record, shard.start, shard.tensors)
