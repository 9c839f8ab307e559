"""Find bytes of a prepared corpus that have changed since it was prepared.

`digests.json` has a digest per block of every file. Corpora of earlier versions lack it; of them
only the token files are compared, each as a whole, with the digests in the manifest.
`verified.json` lists the files that were found whole, so that later starts of a run skip them.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import TypeAdapter, ValidationError

from frontier_llm.data.corpus_manifest import Manifest
from frontier_llm.units import MIB

DIGESTS_FILE, NOTE_FILE = "digests.json", "verified.json"
BLOCK_BYTES = 64 * MIB
"""Size of a block in bytes. It is part of the format of digests.json."""
_FILES = tuple(
    f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "idx", "places")
)
_DIGESTS = TypeAdapter(dict[str, list[str]])
OnRead = Callable[[int], object]
"""A function that is called with the number of bytes after each read."""


@dataclass(frozen=True)
class Damage:
    """The first block of a file that differs."""

    path: Path
    start: int
    """First byte of the block."""
    end: int
    """Byte after the last one."""

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged: its content has changed since it was prepared, in bytes "
            f"{self.start} to {self.end}\n"
            f"  do: delete the folder {self.path.parent}; it is prepared again at the next start"
        )


def write_digests(folder: Path) -> None:
    """Write digests.json of a corpus that was just prepared."""
    digests = {name: list(_block_digests(folder / name, lambda _: None)) for name in _FILES}
    (folder / DIGESTS_FILE).write_text(json.dumps(digests))


def find_damage(
    folder: Path, manifest: Manifest, on_read: OnRead = lambda _: None
) -> Damage | None:
    """Read all files of a corpus; note that they are whole, or return the first damage.

    Raises:
        OSError: a file cannot be read.
    """
    before = _fingerprint(folder)
    try:
        known = _DIGESTS.validate_json((folder / DIGESTS_FILE).read_bytes())
    except (OSError, ValidationError):
        known = {}
    whole = {"train.bin": manifest.train, "validation.bin": manifest.validation}
    for name in _FILES:
        path = folder / name
        if name in known:
            for number, found in enumerate(_block_digests(path, on_read)):
                if [found] != known[name][number : number + 1]:
                    start = number * BLOCK_BYTES
                    return Damage(path, start, min(start + BLOCK_BYTES, path.stat().st_size))
        elif name in whole and _sha256(path, on_read) != whole[name].bin_sha256:
            return Damage(path, 0, path.stat().st_size)
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


def _pieces(path: Path, on_read: OnRead) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(MIB):
            on_read(len(piece))
            yield piece


def _block_digests(path: Path, on_read: OnRead) -> Iterator[str]:
    hasher, size = xxhash.xxh3_128(), 0
    for piece in _pieces(path, on_read):
        hasher.update(piece)
        size += len(piece)
        if size % BLOCK_BYTES == 0:
            yield hasher.hexdigest()
            hasher.reset()
    if size % BLOCK_BYTES:
        yield hasher.hexdigest()


def _sha256(path: Path, on_read: OnRead) -> str:
    hasher = hashlib.sha256()
    for piece in _pieces(path, on_read):
        hasher.update(piece)
    return hasher.hexdigest()
