"""Read whole tensors of a checkpoint, and compare its manifest with the headers of its files."""

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import ELEMENT_BYTES, stored_bytes
from frontier_llm.checkpoint.read_plan import FileCopy, plan_copies, stored_tensor
from frontier_llm.checkpoint.restore import record_of_box, run_copies
from frontier_llm.errors import CheckpointError, damaged_checkpoint
from frontier_llm.protocols import ParameterRecord


def check_headers(checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's manifest with its folder and the files' headers, in both directions.

    Files on the disks of other nodes are not compared. A CheckpointError is raised if a header
    cannot be read, or one side has an entry that the other lacks.
    """
    manifest = checkpoint.manifest
    local = {name: checkpoint.place(name) for name in manifest.files}
    stored: dict[str, tuple[int, int]] = {}
    for file, place in local.items():
        if isinstance(place, Path):
            entries = _entries(place / file, manifest.files[file].size)
            stored |= {f"{key} of {file}": span for key, span in entries.items()}
    for name, tensor in manifest.tensors.items():
        for part in (p for p in tensor.stored_ranges if isinstance(local[p.file], Path)):
            for state, begin in part.bytes_at.items():
                key = part.keys[state]
                # for example `00003/norm.weight.1.master`: rank, tensor, range, state
                base = key.removesuffix(f".{state}").rpartition("/")[2]
                is_of_tensor = base == name or base.removeprefix(f"{name}.").isdigit()
                found = stored.pop(f"{key} of {part.file}", None)
                if not is_of_tensor or found != (
                    begin,
                    begin + stored_bytes(manifest, part, state),
                ):
                    raise _differs(checkpoint, f"{key} of {part.file}")
    others = {path.name for path in checkpoint.folder.glob("rank*.safetensors")} - local.keys()
    for lost in [*sorted(others), *(key for key in stored if not key.startswith("gap."))]:
        raise _differs(checkpoint, lost)


def load_weights(checkpoint: Checkpoint, records: Iterable[ParameterRecord]) -> None:
    """Load weights into contiguous parameters of any layout and dtype; errors as for `load`."""
    check_headers(checkpoint)
    copies: list[FileCopy] = []
    for record in records:
        targets = {"master": record.parameter.data.view(-1)}
        copies += plan_copies(checkpoint, record, 0, targets)
    run_copies(copies, checkpoint)


def read_tensor(
    checkpoint: Checkpoint, name: str, states: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:
    """Read one whole tensor of the model; return its states, or some of them, in fp32.

    Errors are those of `load`.
    """
    tensor = stored_tensor(checkpoint, name)
    shape = tensor.shape
    if prod(shape) * ELEMENT_BYTES > checkpoint.manifest.size:
        raise CheckpointError(f"{checkpoint.folder}: elements of {name} are not stored")
    record = record_of_box(name, shape, (0,) * len(shape), shape)
    targets = {state: torch.empty(prod(shape)) for state in states or tensor.states}
    run_copies(plan_copies(checkpoint, record, 0, targets), checkpoint)
    return {state: values.view(shape) for state, values in targets.items()}


def _differs(checkpoint: Checkpoint, what: str) -> CheckpointError:
    problem = f"its manifest and the headers of its files differ in {what}"
    return damaged_checkpoint(f"{checkpoint.folder} is damaged: {problem}")


def _entries(path: Path, size: int) -> dict[str, tuple[int, int]]:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError("it is longer than the file")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        spans = {key: entry["data_offsets"] for key, entry in entries.items()}
        return {key: (8 + length + begin, 8 + length + end) for key, (begin, end) in spans.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_checkpoint(f"{path} has an unreadable header: {error}") from None
