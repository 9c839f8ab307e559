"""Files are whole whenever somebody reads them."""

import errno
import os
import resource

import pytest

from frontier_llm.atomic_files import replace_text


def test_a_file_without_room_leaves_the_one_before(tmp_path):
    path = tmp_path / "report.html"
    replace_text(path, "é" * 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            replace_text(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8") == "é" * 10
