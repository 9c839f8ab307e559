"""Fill states of any layout from a checkpoint of any other layout.

Only chunks that hold wanted elements are read. Without verification only the bytes from the first
to the last wanted element of a chunk are read; verification needs the whole chunk.

Memory in addition to the states: two chunks, and one byte per element of one shard if the layout
differs from the one that saved, for the check that each element is stored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter

import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import STATES
from frontier_llm.checkpoint.read_ahead import FileRange, ReadAhead
from frontier_llm.checkpoint.read_plan import FileCopy, plan_copies, stored_tensor
from frontier_llm.checkpoint.stored_ranges import Shape
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord, Placement, StateShard


def load(
    checkpoint: Checkpoint,
    shards: Iterable[StateShard],
    verify: bool = True,
    alone: bool = True,
) -> None:
    """Load this rank's states.

    Args:
        checkpoint: a checkpoint of any layout.
        shards: shards of any layout, overwritten; also those that another rank saves.
        verify: whether to compare the digests of all chunks that are read.
        alone: whether no other rank of this host reads the same chunks. If so, reads bypass the
            page cache, which is faster; if not, the page cache serves all ranks after one read.

    Raises:
        CheckpointError: a tensor is absent or has another shape, an element is not stored exactly
            once, or a file is damaged; the message names it. Some states may be overwritten.
    """
    found = [copy for shard in shards for copy in _shard_copies(checkpoint, shard)]
    _run(found, checkpoint, verify, alone)


def load_masters(checkpoint: Checkpoint, shards: Iterable[StateShard], verify: bool = True) -> None:
    """Load this rank's master weights and leave the moments unchanged.

    Args:
        checkpoint: a checkpoint of any layout.
        shards: shards of any layout.
        verify: whether to compare the digests of all chunks that are read.

    Raises:
        CheckpointError: as `load`.
    """
    found: list[FileCopy] = []
    for shard in shards:
        found += plan_copies(checkpoint, shard.record, shard.start, {"master": shard.master})
    _run(found, checkpoint, verify)


def load_weights(
    checkpoint: Checkpoint, records: Iterable[ParameterRecord], verify: bool = True
) -> None:
    """Load weights into parameters of any layout and dtype.

    Args:
        checkpoint: a checkpoint of any layout.
        records: records of contiguous parameters, which are overwritten.
        verify: whether to compare the digests of all chunks that are read.

    Raises:
        CheckpointError: as `load`.
    """
    found: list[FileCopy] = []
    for record in records:
        targets = {"master": record.parameter.data.view(-1)}
        found += plan_copies(checkpoint, record, 0, targets)
    _run(found, checkpoint, verify)


def check_stored(checkpoint: Checkpoint, shards: Iterable[StateShard]) -> None:
    """Check that a checkpoint holds every element of some shards; a node-local one may not.

    Raises:
        CheckpointError: as `load`, except that damaged files are not detected.
    """
    for shard in shards:
        for _ in _shard_copies(checkpoint, shard):
            pass


def check_model(checkpoint: Checkpoint, model: Mapping[str, Shape]) -> None:
    """Reject a checkpoint with tensors that the model lacks; `load` would silently skip them.

    Args:
        checkpoint: a checkpoint of a run.
        model: shapes of all trained tensors of the whole model, by global name.

    Raises:
        CheckpointError: the model lacks a stored tensor; the message names it.
    """
    others: Sequence[str] = sorted(checkpoint.manifest.tensors.keys() - model.keys())
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.folder}: {others[0]}{more} is stored, the model has no such tensor; is "
            "it a checkpoint of another model?"
        )


def read_tensor(
    checkpoint: Checkpoint, name: str, verify: bool = True, states: Sequence[str] = STATES
) -> dict[str, torch.Tensor]:
    """Read the whole of one tensor of the model.

    Args:
        checkpoint: a checkpoint of any layout.
        name: global name of the tensor.
        verify: whether to compare the digests of all chunks that are read.
        states: names of the states to read.

    Returns:
        [global shape] fp32, by state.

    Raises:
        CheckpointError: as `load`.
    """
    shape = stored_tensor(checkpoint, name).shape
    zeros = (0,) * len(shape)
    record = ParameterRecord(
        parameter=torch.nn.Parameter(torch.empty(shape, device="meta")),
        unit="",
        placements=(Placement(name, shape, zeros, zeros, shape),),
        decayed=False,
        counted=True,
        tensor_partial=False,
        tied=False,
    )
    targets = {state: torch.empty(prod(shape)) for state in states}
    _run(plan_copies(checkpoint, record, 0, targets), checkpoint, verify)
    return {state: values.view(shape) for state, values in targets.items()}


def _run(
    found: Iterable[FileCopy], checkpoint: Checkpoint, verify: bool, alone: bool = True
) -> None:
    """Run copies, one chunk of a file after another."""
    chunk_bytes = checkpoint.manifest.chunk_bytes
    split = (part for copy in found for part in copy.split(chunk_bytes))
    ordered = sorted(split, key=attrgetter("file", "at"))
    groups = [list(g) for _, g in groupby(ordered, key=lambda c: (c.file, c.at // chunk_bytes))]
    ranges = [_range(checkpoint, group, verify) for group in groups]
    with ReadAhead(checkpoint, ranges, verify, past_cache=alone) as reader:
        for (range_, content), group in zip(reader, groups, strict=True):
            if isinstance(content, CheckpointError):
                raise content
            for copy in group:
                copy.run(content, range_.start)


def _range(checkpoint: Checkpoint, group: Sequence[FileCopy], verify: bool) -> FileRange:
    """Return the bytes that copies from one chunk need."""
    name, chunk_bytes = group[0].file, checkpoint.manifest.chunk_bytes
    if not verify:
        return FileRange(name, group[0].at, max(copy.end for copy in group))
    start = group[0].at // chunk_bytes * chunk_bytes
    return FileRange(name, start, min(start + chunk_bytes, checkpoint.manifest.files[name].size))


def _shard_copies(checkpoint: Checkpoint, shard: StateShard) -> Iterator[FileCopy]:
    targets = {state: getattr(shard, state) for state in STATES}
    return plan_copies(checkpoint, shard.record, shard.start, targets)
