"""Compare a manifest with the headers of the checkpoint's safetensors files.

The header of a file names every entry and its position. A manifest that gives an entry another
name or position would make a reader use the wrong values.
"""

import json
from pathlib import Path

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest_check import stored_bytes
from frontier_llm.errors import CheckpointError


def check_headers(checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's manifest with its folder and the files' headers, in both directions.

    Files on the disks of other nodes are not compared.

    Raises:
        CheckpointError: a header cannot be read, or one side has an entry that the other lacks.
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


def _differs(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder} is damaged: its manifest and the headers of its files differ in "
        f"{what}\n  do: move this checkpoint away, and use another one or a copy of it"
    )


def _entries(path: Path, size: int) -> dict[str, tuple[int, int]]:
    """Return the first byte and the end of each entry of a file of `size` bytes."""
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
        raise CheckpointError(f"{path} has an unreadable header: {error}") from None
