"""Find bytes of a prepared corpus that have changed since it was prepared.

`digests.json` has a digest per block of every file. Corpora of format 2 may lack it; of them only
the token files are compared, each as a whole, with the digests in the manifest. `verified.json`
lists the files that were found whole, so that later starts of a run skip them.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from frontier_llm.data.corpus_manifest import Manifest
from frontier_llm.units import MIB

DIGESTS_FILE, NOTE_FILE = "digests.json", "verified.json"
BLOCK_BYTES = 64 * MIB
"""Size of a block in bytes. It is part of the format of digests.json."""
_FILES = [
    f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "idx", "places")
]
_DIGESTS = TypeAdapter(dict[str, list[str]])
OnRead = Callable[[int], None]
"""A function that is called with the number of bytes after each read."""


@dataclass(frozen=True)
class Damage:
    """The first block of a file that differs."""

    path: Path
    start: int
    end: int

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged: its content has changed since the corpus was prepared, in "
            f"bytes {self.start} to {self.end}\n"
            f"  do: delete the folder {self.path.parent}; it is prepared again at the next start"
        )


def write_digests(folder: Path) -> None:
    """Write digests.json of a corpus that was just prepared."""
    digests = {name: list(_digests(folder / name, BLOCK_BYTES)) for name in _FILES}
    (folder / DIGESTS_FILE).write_text(json.dumps(digests))


def find_damage(folder: Path, manifest: Manifest, on_read: OnRead | None = None) -> Damage | None:
    """Read all files of a corpus; note that they are whole, or return the first damage."""
    before = _fingerprint(folder)
    try:
        known = _DIGESTS.validate_json((folder / DIGESTS_FILE).read_bytes())
    except (OSError, ValidationError):
        known = {}
    if manifest.account is not None and not before.keys() <= known.keys():
        return Damage(folder / DIGESTS_FILE, 0, 0)
    for name, (size, *_) in before.items():
        path, wanted, block = folder / name, known.get(name), BLOCK_BYTES
        found = _digests(path, block, on_read)
        if wanted is None and name.endswith(".bin"):
            split = manifest.train if name == "train.bin" else manifest.validation
            wanted, block = [split.bin_sha256], max(size, 1)
            found = _digests(path, block, on_read, hashlib.sha256)
        for number, digest in enumerate(found) if wanted is not None else ():
            if [digest] != (wanted or [])[number : number + 1]:
                return Damage(path, number * block, min((number + 1) * block, size))
    with suppress(OSError):  # the folder of another user: every start reads the files
        draft = folder / f".{NOTE_FILE}-{uuid.uuid4().hex[:12]}"
        draft.write_text(json.dumps(before))
        draft.replace(folder / NOTE_FILE)
    return None


def is_verified(folder: Path) -> bool:
    """Return whether `find_damage` has found the files whole, and they have not changed since."""
    with suppress(OSError, ValueError, RecursionError):
        return bool(json.loads((folder / NOTE_FILE).read_bytes()) == _fingerprint(folder))
    return False


def _fingerprint(folder: Path) -> dict[str, list[int]]:
    """Return the size, the time of the last change and the inode of each file."""
    found = {name: (folder / name).stat() for name in _FILES}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in found.items()}


def _digests(
    path: Path, block: int, on_read: OnRead | None = None, make_hasher: Any = xxhash.xxh3_128
) -> Iterator[str]:
    hasher, left = make_hasher(), block
    with path.open("rb") as stream:
        while piece := stream.read(min(MIB, left)):
            hasher.update(piece)
            left -= len(piece)
            if on_read is not None:
                on_read(len(piece))
            if not left:
                yield hasher.hexdigest()
                hasher, left = make_hasher(), block
    if left < block:
        yield hasher.hexdigest()
