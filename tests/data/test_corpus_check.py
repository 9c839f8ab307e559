"""Corrupt bytes of a prepared corpus are found, with the file and the place."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontier_llm.data import corpus_manifest
from frontier_llm.data.corpus_manifest import (
    DIGESTS_FILE,
    MANIFEST_FILE,
    NOTE_FILE,
    VALIDATION_FILES,
    find_damage,
    is_verified,
)
from frontier_llm.data.loader import BatchLoader
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import Samples, open_corpus
from frontier_llm.errors import DataError
from tests.data.conftest import config, write_jsonl
from tests.hostile import NUMBERS, changed, leaves

FILES = [
    f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "idx", "places")
]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make blocks small; return their size."""
    monkeypatch.setattr(corpus_manifest, "BLOCK_BYTES", 64)
    monkeypatch.setattr(corpus_manifest, "MIB", 16)
    return 64


@pytest.fixture
def fresh(tmp_path: Path, blocks: int) -> Path:
    return prepare(config(tmp_path / "corpus", write_jsonl(tmp_path / "text.jsonl", 40)), workers=1)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found_in_its_block(name: str, fresh: Path, blocks: int) -> None:
    assert find_damage(fresh) is None
    size = (fresh / name).stat().st_size
    for place in random.Random(3).sample(range(size), 5):
        flip(fresh / name, place)
        damage = find_damage(fresh)
        assert damage is not None
        assert damage.path == fresh / name
        assert damage.start == place // blocks * blocks
        assert damage.end == min(damage.start + blocks, size)
        flip(fresh / name, place)
    assert find_damage(fresh) is None


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"train.bin": 3}', b"[" * 100_000])
def test_damaged_digests_are_named(content: bytes | None, fresh: Path) -> None:
    if content is None:
        (fresh / DIGESTS_FILE).unlink()
    else:
        (fresh / DIGESTS_FILE).write_bytes(content)
    assert find_damage(fresh).path == fresh / DIGESTS_FILE
    with pytest.raises(DataError, match=r"digests\.json is damaged: its content has changed"):
        open_corpus(fresh, verify=True)


def test_files_are_read_again_only_after_a_change(fresh: Path) -> None:
    assert not is_verified(fresh)
    find_damage(fresh)
    assert is_verified(fresh)
    status = (fresh / "train.bin").stat()
    flip(fresh / "train.bin", 0)
    assert not is_verified(fresh)
    flip(fresh / "train.bin", 0)
    os.utime(fresh / "train.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert is_verified(fresh)
    (fresh / NOTE_FILE).write_text("[" * 100_000)
    assert not is_verified(fresh)


def test_one_split_read_later_leaves_the_note_of_the_other(fresh: Path) -> None:
    find_damage(fresh)
    assert is_verified(fresh, VALIDATION_FILES)
    os.utime(fresh / "validation.bin", ns=(1, 1))
    assert not is_verified(fresh)
    find_damage(fresh, files=VALIDATION_FILES)
    assert is_verified(fresh)


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(fresh: Path) -> None:
    """The oracle is the damaged place itself; every other sample can be read."""
    corpus = open_corpus(fresh)
    samples = Samples(corpus.train, 16, 7, corpus.manifest.digest)
    place = len(corpus.train) // 2
    tokens = np.fromfile(fresh / "train.bin", dtype=np.uint16)
    tokens[place] = 0xFFFF
    tokens.tofile(fresh / "train.bin")
    stream = open_corpus(fresh).train
    samples = Samples(stream, 16, 7, corpus.manifest.digest)
    document = stream.document_at(place)
    refused = 0
    for index in range(len(samples)):
        ((start, count),) = samples.ranges(index)
        if start <= place < start + count:
            message = (
                rf"train\.bin is damaged: token 65535 at byte {2 * place} \(document {document}\)"
            )
            with pytest.raises(DataError, match=message):
                samples[index]
            refused += 1
        else:
            samples[index]
    assert refused in (1, 2)
    loader = BatchLoader(samples, len(samples), 1, 0, 1)
    with pytest.raises(DataError, match="token 65535 at byte"):
        loader.micro_batches(0)
    loader.close()


def test_no_value_of_a_manifest_ends_in_a_traceback(fresh: Path) -> None:
    content = json.loads((fresh / MANIFEST_FILE).read_text())
    for path in leaves(content):
        for new in NUMBERS:
            case: Any = changed(content, path, new)
            (fresh / MANIFEST_FILE).write_text(json.dumps(case))
            try:
                open_corpus(fresh, verify=True).train.read(0, 16)
            except DataError:
                continue
