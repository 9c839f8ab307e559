"""Fill states of any layout from a checkpoint of any other.

Of a file only those chunks are read that hold something wanted; of these only what lies between
the first and the last such element, unless they are verified, which takes the whole chunk.

Memory beside the states: two chunks. Where the layout is another than that which saved, one byte
an element of one shard as well, to see that nothing is missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter

import torch

from frontier_llm.checkpoint.copies import Copy, copies, stored_tensor
from frontier_llm.checkpoint.manifest import STATES
from frontier_llm.checkpoint.pieces import Shape
from frontier_llm.checkpoint.reader import Range, ReadAhead
from frontier_llm.checkpoint.scan import Checkpoint
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import ParameterRecord, Placement, StateShard


def load(
    checkpoint: Checkpoint,
    shards: Iterable[StateShard],
    verify: bool = True,
    alone: bool = True,
) -> None:
    """Fill this rank's states.

    Args:
        checkpoint: of any layout.
        shards: of any layout, overwritten; also what another rank saves.
        verify: whether to compare digests of all that is read.
        alone: whether no other rank of this host reads the same: then it is read past the page
            cache, which is faster; else the disk gives it once for all of them.

    Raises:
        CheckpointError: a tensor is absent or of another shape, an element is not stored exactly
            once, or a file is damaged; names it. Some states may be overwritten by then.
    """
    found = [copy for shard in shards for copy in _shard_copies(checkpoint, shard)]
    _run(found, checkpoint, verify, alone)


def load_masters(checkpoint: Checkpoint, shards: Iterable[StateShard], verify: bool = True) -> None:
    """Fill this rank's master weights, and leave the moments alone.

    Args:
        checkpoint: of any layout.
        shards: of any layout.
        verify: whether to compare digests of all that is read.

    Raises:
        CheckpointError: as `load`.
    """
    found: list[Copy] = []
    for shard in shards:
        found += copies(checkpoint, shard.record, shard.start, {"master": shard.master})
    _run(found, checkpoint, verify)


def load_weights(
    checkpoint: Checkpoint, records: Iterable[ParameterRecord], verify: bool = True
) -> None:
    """Fill parameters of any layout and number format, and nothing else.

    Args:
        checkpoint: of any layout.
        records: whose parameters are overwritten; contiguous.
        verify: whether to compare digests of all that is read.

    Raises:
        CheckpointError: as `load`.
    """
    found: list[Copy] = []
    for record in records:
        runs = {"master": record.parameter.data.view(-1)}
        found += copies(checkpoint, record, 0, runs)
    _run(found, checkpoint, verify)


def check_stored(checkpoint: Checkpoint, shards: Iterable[StateShard]) -> None:
    """See that a checkpoint holds every element of some states; a node's own may not.

    Raises:
        CheckpointError: as `load`, but for damage.
    """
    for shard in shards:
        for _ in _shard_copies(checkpoint, shard):
            pass


def check_model(checkpoint: Checkpoint, model: Mapping[str, Shape]) -> None:
    """Refuse a checkpoint that holds more than a model has: `load` would leave it out.

    Args:
        checkpoint: of a run.
        model: shapes of all trained tensors of the whole model.

    Raises:
        CheckpointError: a stored tensor is none of the model's; names it.
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
    """Read one tensor of the model, whole.

    Args:
        checkpoint: of any layout.
        name: of the tensor.
        verify: whether to compare digests of all that is read.
        states: which of them to read.

    Returns:
        [global shape] fp32 by state.

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
    runs = {state: torch.empty(prod(shape)) for state in states}
    _run(copies(checkpoint, record, 0, runs), checkpoint, verify)
    return {state: run.view(shape) for state, run in runs.items()}


def _run(found: Iterable[Copy], checkpoint: Checkpoint, verify: bool, alone: bool = True) -> None:
    """Make copies, chunk of file by chunk of file."""
    chunk_bytes = checkpoint.manifest.chunk_bytes
    cut = sorted((c for copy in found for c in copy.cut(chunk_bytes)), key=attrgetter("file", "at"))
    groups = [list(g) for _, g in groupby(cut, key=lambda c: (c.file, c.at // chunk_bytes))]
    ranges = [_range(checkpoint, group, verify) for group in groups]
    with ReadAhead(checkpoint, ranges, verify, past_cache=alone) as reader:
        for (range_, content), group in zip(reader, groups, strict=True):
            if isinstance(content, CheckpointError):
                raise content
            for copy in group:
                copy.run(content, range_.start)


def _range(checkpoint: Checkpoint, group: Sequence[Copy], verify: bool) -> Range:
    """Return what must be read for copies from one chunk."""
    name, chunk_bytes = group[0].file, checkpoint.manifest.chunk_bytes
    if not verify:
        return Range(name, group[0].at, max(copy.end for copy in group))
    start = group[0].at // chunk_bytes * chunk_bytes
    return Range(name, start, min(start + chunk_bytes, checkpoint.manifest.files[name].size))


def _shard_copies(checkpoint: Checkpoint, shard: StateShard) -> Iterator[Copy]:
    runs = {state: getattr(shard, state) for state in STATES}
    return copies(checkpoint, shard.record, shard.start, runs)
