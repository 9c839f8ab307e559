"""The final weights of a run: a safetensors file a rank, and a manifest that places each box.

    weights/rank_00000.safetensors   boxes of global tensors
    weights/manifest.json            {name: {"shape", "boxes": [{"file", "key", "start", "shape"}]}}

The manifest is written last: without it there are no weights. Padding is not stored.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from frontier_llm.errors import DataError
from frontier_llm.protocols import ParameterRecord, Placement

MANIFEST = "manifest.json"


def save_weights(
    folder: Path,
    parameters: Iterable[tuple[ParameterRecord, torch.Tensor]],
    is_first_replica: bool,
) -> None:
    """Write the weights of all ranks.

    Collective over all ranks; blocks until the manifest is there.

    Args:
        folder: made if absent.
        parameters: this rank's parameters, each whole until the next one is drawn. Drawing may be
            collective, so every rank draws them all.
        is_first_replica: whether this rank's data-parallel replica is the one that writes.

    Raises:
        DataError: a file cannot be written.
    """
    rank = dist.get_rank()
    name = f"rank_{rank:05d}.safetensors"
    tensors: dict[str, tuple[Placement, torch.Tensor]] = {}
    for record, tensor in parameters:
        if is_first_replica and record.counted:
            tensors.update(_boxes(record, tensor))
    boxes = [_entry(name, placement) for placement, _ in tensors.values()]
    error = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            save_file({key: view for key, (_, view) in tensors.items()}, folder / name)
    except Exception as failure:  # told to all ranks, which then fail together
        error = f"{folder / name}: {failure}"
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (error, boxes))
    failures = [failure for failure, _ in gathered if failure]
    if failures:
        raise DataError(f"the weights cannot be written: {failures[0]}")
    if rank == 0:
        _write_manifest(folder, [box for _, found in gathered for box in found])
    dist.barrier()


def load_weights(folder: Path, records: Sequence[ParameterRecord]) -> None:
    """Fill this rank's parameters from weights of any layout, reading only what it needs.

    Raises:
        DataError: there are no weights, a tensor is absent or has another shape, or an element
            is not covered.
    """
    manifest = _read_manifest(folder)
    for record in records:
        for placement in record.placements:
            _load(folder, manifest, placement, placement.local_view(record.parameter.data))


def _boxes(
    record: ParameterRecord, tensor: torch.Tensor
) -> Iterator[tuple[str, tuple[Placement, torch.Tensor]]]:
    """Yield copies of the boxes that a parameter is made of, by name; empty ones left out."""
    for placement in record.placements:
        if 0 not in placement.shape:
            box = placement.local_view(tensor).clone(memory_format=torch.contiguous_format)
            yield placement.name, (placement, box.cpu())


def _entry(file: str, placement: Placement) -> dict[str, Any]:
    return {
        "name": placement.name,
        "global_shape": placement.global_shape,
        "file": file,
        "key": placement.name,
        "start": placement.global_start,
        "shape": placement.shape,
    }


def _write_manifest(folder: Path, boxes: Sequence[dict[str, Any]]) -> None:
    manifest: dict[str, Any] = {}
    for box in boxes:
        entry = manifest.setdefault(box["name"], {"shape": box["global_shape"], "boxes": []})
        entry["boxes"].append({key: box[key] for key in ("file", "key", "start", "shape")})
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=1))
    partial.rename(folder / MANIFEST)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise DataError(f"{folder} holds no weights ({MANIFEST} is absent)") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {error}") from None
    return manifest


def _load(folder: Path, manifest: dict[str, Any], placement: Placement, view: torch.Tensor) -> None:
    entry = manifest.get(placement.name)
    if entry is None or tuple(entry["shape"]) != placement.global_shape:
        found = "absent" if entry is None else f"of shape {entry['shape']}"
        raise DataError(
            f"{folder}: {placement.name} is {found}, the model wants "
            f"{list(placement.global_shape)}; is it another model?"
        )
    covered = 0
    for box in entry["boxes"]:
        covered += _copy_overlap(folder, box, placement, view)
    if covered != view.numel():
        raise DataError(
            f"{folder}: {covered} of {view.numel()} elements of {placement.name} are stored"
        )


def _copy_overlap(
    folder: Path, box: dict[str, Any], placement: Placement, view: torch.Tensor
) -> int:
    """Copy what a stored box and a placement have in common; return its elements."""
    source, target, elements = [], [], 1
    for stored, size, wanted, length in zip(
        box["start"], box["shape"], placement.global_start, placement.shape, strict=True
    ):
        first, last = max(stored, wanted), min(stored + size, wanted + length)
        if first >= last:
            return 0
        source.append(slice(first - stored, last - stored))
        target.append(slice(first - wanted, last - wanted))
        elements *= last - first
    try:
        with safe_open(folder / box["file"], framework="pt") as file:
            view[tuple(target)].copy_(file.get_slice(box["key"])[tuple(source)])
    except Exception as error:
        raise DataError(f"{folder / box['file']} is absent or damaged: {error}") from None
    return elements
