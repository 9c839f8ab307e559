"""Compare a manifest with the headers of the checkpoint's safetensors files.

The header of a file names every entry and its position. A manifest that gives an entry another
name or position would make a reader use the wrong values.
"""

import json
from pathlib import Path

from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest_check import stored_bytes
from frontier_llm.checkpoint.peer_files import Peer
from frontier_llm.errors import CheckpointError

Entries = dict[str, tuple[int, int]]
"""First byte and end of each entry in its file, by key."""


def check_headers(checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's manifest with the headers of its files, in both directions.

    Files on the disks of other nodes are not compared.

    Raises:
        CheckpointError: a header cannot be read or differs, or has an entry that the manifest
            lacks, or the folder has a file that the manifest lacks.
    """
    manifest = checkpoint.manifest
    entries = {
        file: _entries(place / file, content.size)
        for file, content in manifest.files.items()
        if not isinstance(place := checkpoint.place(file), Peer)
    }
    for name, tensor in manifest.tensors.items():
        for stored in tensor.stored_ranges:
            for state, key in stored.keys.items() if stored.file in entries else ():
                begin = stored.bytes_at[state]
                end = begin + stored_bytes(stored, state, manifest.moments)
                # for example `00003/norm.weight.1.master`: rank, tensor, range, state
                base = key.removesuffix(f".{state}").rpartition("/")[2]
                is_of_tensor = base == name or base.removeprefix(f"{name}.").isdigit()
                if not is_of_tensor or entries[stored.file].pop(key, None) != (begin, end):
                    raise _differs(checkpoint, f"{key} (bytes {begin} to {end}) of {stored.file}")
    on_disk = {path.name for path in checkpoint.folder.glob("rank*.safetensors")}
    for file in sorted(on_disk - manifest.files.keys()):
        raise _differs(checkpoint, file)
    for file, others in entries.items():
        for key in others:
            if not key.startswith("gap."):
                raise _differs(checkpoint, f"{key} of {file}")


def _differs(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder} is damaged: its manifest and the headers of its files differ in "
        f"{what}\n  do: move this checkpoint away, and use another one or a copy of it"
    )


def _entries(path: Path, size: int) -> Entries:
    """Return the entries of a file of `size` bytes."""
    entries: Entries = {}
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError("it is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] in ("F32", "U8"):
                entries[key] = 8 + length + begin, 8 + length + end
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has an unreadable header: {error}") from None
    return entries
