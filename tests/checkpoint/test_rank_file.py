"""A file whose writing was interrupted goes on: only the chunks that it lacks are written."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.errors import CheckpointError

CHUNK = 4096
LAST = 1000
"""Bytes of the last chunk."""


def write(path: Path, content: bytes, *, offset: int = 0, total: int | None = None) -> int:
    """Write a file that continues an earlier one; return how many bytes were kept."""
    buffer = ChunkPool(1, CHUNK, torch.device("cpu")).take()
    assert buffer is not None
    with RankFile(path, len(content), offset, total, continues=True) as file:
        for start in range(0, len(content), CHUNK):
            part = content[start : start + CHUNK]
            buffer.zero_()
            buffer[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            file.write(buffer, len(part))
        file.finish()
        return file.kept_bytes


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the sizes of all writes from now on."""
    sizes, pwrite = list[int](), os.pwrite

    def counted(descriptor: int, content: Any, offset: int) -> int:
        sizes.append(pwrite(descriptor, content, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "pwrite", counted)
    return sizes


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        pytest.param(lambda content: None, 4, id="nothing"),
        pytest.param(lambda content: content, 0, id="everything"),
        pytest.param(lambda content: content[: 2 * CHUNK], 2, id="half"),
        pytest.param(lambda content: content[: 2 * CHUNK + 10], 2, id="a torn chunk"),
        pytest.param(
            lambda content: content[:CHUNK] + bytes(len(content) - CHUNK), 3, id="reserved space"
        ),
        pytest.param(
            lambda content: content[:CHUNK] + bytes([content[CHUNK] ^ 1]) + content[CHUNK + 1 :],
            1,
            id="another byte",
        ),
        pytest.param(lambda content: content + bytes(CHUNK), 0, id="padding after the end"),
    ],
)
def test_only_missing_chunks_are_written(
    left: Any, missing: int, tmp_path: Path, written: list[int]
) -> None:
    path, content = tmp_path / "file", os.urandom(3 * CHUNK + LAST)
    earlier = left(content)
    if earlier is not None:
        path.write_bytes(earlier)
    kept = write(path, content)
    assert path.read_bytes() == content
    assert len(written) == missing
    assert sum(written) == missing * CHUNK
    lacks_last = missing > 1
    assert kept == (4 - missing) * CHUNK - (0 if lacks_last else CHUNK - LAST)


def test_parts_of_a_shared_file_go_on_alone(tmp_path: Path, written: list[int]) -> None:
    path, content = tmp_path / "file", os.urandom(4 * CHUNK)
    path.write_bytes(content[: 3 * CHUNK] + bytes(CHUNK))
    first, second = content[: 2 * CHUNK], content[2 * CHUNK :]
    assert write(path, first, total=len(content)) == 2 * CHUNK
    assert write(path, second, offset=2 * CHUNK, total=len(content)) == CHUNK
    assert written == [CHUNK]
    assert path.read_bytes() == content


def test_a_finished_file_is_closed(tmp_path: Path) -> None:
    write(tmp_path / "file", os.urandom(LAST))
    opened = [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]
    assert tmp_path / "file" not in opened


@pytest.mark.parametrize(("code", "is_written"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_where_direct_writes_are_rejected_others_are_used(
    code: int, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content, pwrite = tmp_path / "file", os.urandom(CHUNK + LAST), os.pwrite

    def rejected(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", rejected)
    if is_written:
        write(path, content)
        assert path.read_bytes() == content
    else:
        with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
            write(path, content)
        assert not path.exists()
