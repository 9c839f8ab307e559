"""Malformed corpora are read, or refused with what is wrong and what to do."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.data.prepare import prepare
from frontier_llm.errors import DataError, FrontierError
from tests.data.conftest import config
from tests.data.test_file_formats import parquet, zstandard

GOOD = "".join(json.dumps({"text": f"text {n} of many"}) + "\n" for n in range(60)).encode()
ARRAY = json.dumps([json.loads(line) for line in GOOD.splitlines()]).encode()
DEEP = b"[" * 200_000
CONTENTS = {
    "empty": b"", "blank": b"\n \r\n\t\n", "nul": bytes(5000), "one_nul": GOOD[:99] + b"\0" + GOOD,
    "cut": GOOD[:-7], "cut_first": GOOD[7:], "latin": GOOD.replace(b"many", b"m\xe4ny"),
    "deep_line": b'{"text": ' + DEEP + b"\n" + GOOD, "deep_array": DEEP, "array": ARRAY,
    "array_without_end": ARRAY[:-1], "array_cut": ARRAY[:-40], "array_and_more": ARRAY + b"[]",
    "array_of_numbers": b"[1, 2, 3e999, -0]", "array_of_arrays": b"[[[]]]", "empty_array": b"[]",
    "huge_number": b'{"text": ' + b"9" * 5000 + b"}\n" + GOOD, "null": b"null\n" * 9,
    "nan": b'{"text": NaN}\n' * 9, "numbers": b"1\n2\n3\n", "strings": b'"a"\n"b"\n',
    "twice": b'{"text": "a", "text": 1}\n' * 9, "nested": b'{"text": {"text": "a"}}\n' * 9,
    "surrogates": b'{"text": "\\ud83d \\ude00 \\ud83d\\ude00"}\n' * 40, "bom": b"\xef\xbb\xbf" * 9,
    "utf16": GOOD.decode().encode("utf-16"), "utf32": GOOD.decode().encode("utf-32"),
    "quotes": b'id,text\n1,"never closed\n' * 9, "header": b"id,text\n",
    "ragged": b"text,b\n1\n1,2,3\n",
    "cr": GOOD.replace(b"\n", b"\r"), "random": bytes(range(256)) * 40, "one_byte": b"{",
    "par": b"PAR1", "par_twice": b"PAR1\0\0\0\0PAR1",
    "par_length": b"PAR1" + b"\xff" * 60 + b"PAR1",
    "gzip_head": b"\x1f\x8b", "zstd_head": b"\x28\xb5\x2f\xfd", "xz_head": b"\xfd7zXZ\0",
    "bz": b"BZh9",
}  # fmt: skip
NAMES = ("a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a", "a.jsonl.gz", "a.json.zst")
FORMATS = ("auto", "text", "jsonl", "json", "csv", "parquet")
READINGS = [(name, in_folder, form) for name in NAMES for in_folder in (0, 1) for form in FORMATS]


@pytest.mark.parametrize("broken", ["refuse", "skip"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_a_malformed_corpus_is_read_or_refused(
    tmp_path: Path, folder: Path, kind: str, broken: str
):
    """The readings of a kind are a seventh of all; neighbours of it have the others."""
    first = list(CONTENTS).index(kind) + 3 * (broken == "skip")
    for name, in_folder, form in READINGS[first % 7 :: 7]:
        check(tmp_path / name, CONTENTS[kind], folder, broken, [(in_folder, form)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("broken", ["refuse", "skip"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_a_malformed_corpus_is_read_or_refused_in_every_way(
    tmp_path: Path, folder: Path, kind: str, broken: str
):
    for name in NAMES:
        check(tmp_path / name, CONTENTS[kind], folder, broken)


ALL = [(in_folder, form) for in_folder in (0, 1) for form in FORMATS]


def check(path: Path, content: bytes, folder: Path, broken: str, ways=ALL) -> None:
    """Prepare a file, or the folder of it, in the formats of `ways`."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    model = str(folder / "tokenizer.model")
    for in_folder, form in ways:
        values = {"tokenizer": model, "broken": broken, "format": form}
        source = path.parent if in_folder else path
        try:
            prepare(config(path.parent / ".corpora", source, **values), workers=1)
        except FrontierError as error:
            message = str(error)
            assert "\n  do: " in message or "\n  do:   " in message
            assert len(message) < 2000
    path.unlink()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard])
@pytest.mark.parametrize("damage", ["cut", "flipped", "trailing"])
def test_damaged_compression_is_refused(tmp_path: Path, folder: Path, pack, damage: str):
    suffix = {gzip.compress: "gz", bz2.compress: "bz2", lzma.compress: "xz", zstandard: "zst"}[pack]
    packed = bytearray(pack(GOOD * 50))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 255
    content = {"cut": packed[:-9], "flipped": packed, "trailing": packed + b"more"}[damage]
    for name in (f"a.jsonl.{suffix}", f"a.json.{suffix}", f"a.csv.{suffix}", f"a.txt.{suffix}"):
        check(tmp_path / name, bytes(content), folder, "refuse")


def test_damaged_parquet_is_refused(tmp_path: Path, folder: Path):
    content = parquet()
    for position in range(4, len(content), max(len(content) // 25, 1)):
        damaged = bytearray(content)
        damaged[position] ^= 255
        check(tmp_path / "a.parquet", bytes(damaged), folder, "refuse")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "suffix",
    ["jsonl.gz", "json.gz", "csv.gz", "jsonl.zst", "jsonl.xz"],
)
def test_a_line_of_a_gibibyte_is_refused_in_little_memory(tmp_path: Path, suffix: str):
    """Decompression alone would need a gibibyte for the line; the process may take 700 MiB more."""
    path = tmp_path / f"a.{suffix}"
    start = b'[{"text": "' if suffix.startswith("json.") else b'{"text": "'
    start = b"id,text\n1," if suffix.startswith("csv") else start
    block, count = b"a" * (1 << 20), 1024
    if suffix.endswith("zst"):
        library = pytest.importorskip("zstandard")
        with library.open(path, "wb") as target:
            target.write(start)
            for _ in range(count):
                target.write(block)
    else:
        module = lzma if suffix.endswith("xz") else gzip
        options = {"preset": 0} if module is lzma else {"compresslevel": 1}
        with module.open(path, "wb", **options) as target:
            target.write(start)
            for _ in range(count):
                target.write(block)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from frontier_llm.data.prepare import prepare\n"
        "from tests.data.conftest import config\n"
        "from frontier_llm.errors import DataError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    prepare(config(Path(sys.argv[2]), Path(sys.argv[1])), workers=1)\n"
        "except DataError as error:\n    print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    arguments = [sys.executable, "-c", program, str(path), str(tmp_path / "corpora")]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    *message, mebibytes = output.splitlines()
    assert "longer than 64.00 MiB" in "\n".join(message)
    assert int(mebibytes) < 700


def test_few_documents_name_the_many_that_were_left_out(tmp_path: Path) -> None:
    rows = [{"content": f"text number {number}"} for number in range(50)] + [{"text": "one two"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"50 documents left out, such as .*text_key"):
        prepare(config(tmp_path / "c", tmp_path / "a.jsonl", broken="skip"))
