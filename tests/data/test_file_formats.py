"""Formats of source files: from their content, checked against their names."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.data import file_formats, file_readers, source_format
from frontier_llm.data.file_formats import detect
from frontier_llm.data.file_readers import JsonValues
from frontier_llm.errors import DataError
from tests.data.conftest import config, documents
from tests.properties import examples

TEXTS = [f'the {word} fox\nand {word}, "quoted" 雪' for word in "red green blue grey".split()]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
CSV = "id,text\n" + "".join('1,"{}"\n'.format(text.replace('"', '""')) for text in TEXTS)
ARRAY = json.dumps([{"text": text} for text in TEXTS]).encode()
PROSE = b"{A play} in verse.\n[Enter the king.]\n\n{He speaks}\nOnce more.\n"


def zstandard(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


def parquet(column: str = "text", copies: int = 1) -> bytes:
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    target = io.BytesIO()
    files.write_table(pyarrow.table({column: TEXTS * copies}), target)
    return target.getvalue()


def tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    return target.getvalue()


def zipped() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a", LINES)
    return target.getvalue()


READ = [
    ("train.json", LINES), ("train.ndjson", LINES), ("UPPER.JSONL", LINES), ("a.JsonLines", LINES),
    ("c4-train.00000-of-01024.json.gz", gzip.compress(LINES)),
    ("cc_en_head-0000.json.gz", gzip.compress(LINES)), ("val.jsonl.xz", lzma.compress(LINES)),
    ("00.jsonl.bz2", bz2.compress(LINES)), ("a.jsonl.gz", gzip.compress(LINES) * 1),
    ("bom.jsonl", b"\xef\xbb\xbf" + LINES), ("crlf.jsonl", LINES.replace(b"\n", b"\r\n")),
    ("two_boms.jsonl", b"\xef\xbb\xbf" + b"\n\xef\xbb\xbf".join(LINES.splitlines())),
    ("cr.jsonl", LINES.replace(b"\n", b"\r")), ("blank.jsonl", LINES.replace(b"\n", b"\n\n \n")),
    ("array.json", ARRAY), ("indented.json", json.dumps(json.loads(ARRAY), indent=2).encode()),
    ("bom.json", b"\xef\xbb\xbf" + ARRAY), ("array.json.gz", gzip.compress(ARRAY)),
    ("table.csv", CSV.encode()), ("bom.csv", b"\xef\xbb\xbf" + CSV.encode()),
    ("crlf.csv", CSV.replace('"\n', '"\r\n').encode()), ("t.csv.gz", gzip.compress(CSV.encode())),
    ("table.tsv", CSV.replace(",t", "\tt").replace("1,", "1\t").encode()),
]  # fmt: skip


END = "<|endoftext|>"
MARKED = [
    f"\n{END}\n".join(TEXTS), "".join(f"{text}\n{END}\n" for text in TEXTS),
    f"\r\n{END}\r\n\r\n".join(TEXTS), f"\ufeff{TEXTS[0]}{END}\n" + f"{END}\n".join(TEXTS[1:]),
    f"{END}\n".join([*TEXTS[:3], f"{TEXTS[3]}<|end_of_text|>\n \n"]),
    f"{TEXTS[0]}{END}{TEXTS[1]}{END}\n{TEXTS[2]}{END}\n{TEXTS[3]}",
]  # fmt: skip


@pytest.mark.parametrize("cut", [10, file_readers.CUT_BYTES])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("content", MARKED)
def test_marks_of_their_ends_divide_a_text_into_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, pack, cut: int
):
    monkeypatch.setattr(file_readers, "CUT_BYTES", cut)
    path = tmp_path / "stories.txt"
    path.write_bytes(pack(content.encode()))
    path = path.rename(tmp_path / "stories.txt.gz") if pack is gzip.compress else path
    assert [d.text for d in documents(config(tmp_path, path))] == TEXTS
    raw = documents(config(tmp_path, path, format="text"))
    assert END in "".join(document.text for document in raw)


@pytest.mark.parametrize("text", [f"The mark {END} ends it.\n" * 9, f"{END}\nonce\n", "a\n\nb"])
def test_a_text_about_marks_is_read_as_it_is(tmp_path: Path, text: str):
    path = tmp_path / "a.txt"
    path.write_text(text)
    assert "".join(d.text for d in documents(config(tmp_path, path))) == text


@pytest.mark.parametrize(("name", "content"), READ, ids=[name for name, _ in READ])
def test_records_are_read_under_all_names_of_their_format(
    tmp_path: Path, name: str, content: bytes
):
    path = tmp_path / name
    path.write_bytes(content)
    found = documents(config(tmp_path, path))
    assert [d.text for d in found] == TEXTS
    assert len({d.name for d in found}) == len(TEXTS)


def test_zstandard_and_parquet_are_read(tmp_path: Path):
    for name, content in (
        ("00.jsonl.zst", zstandard(LINES)), ("a.json.zst", zstandard(ARRAY)),
        ("b.csv.zst", zstandard(CSV.encode())), ("c.parquet", parquet()), ("d.PQ", parquet()),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert [d.text for d in documents(config(tmp_path, tmp_path / name))] == TEXTS


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard])
def test_compressed_text_is_divided_into_the_sections_of_plain_text(tmp_path: Path, pack):
    text = "".join(f"Paragraph {i}\nof two lines.\n\n" for i in range(3000))
    suffix = {gzip.compress: "gz", bz2.compress: "bz2", lzma.compress: "xz", zstandard: "zst"}[pack]
    path = tmp_path / f"book.txt.{suffix}"
    path.write_bytes(pack(text.encode()))
    found = documents(config(tmp_path, path))
    assert "".join(d.text for d in found) == text
    assert len(found) > 20
    whole = tmp_path / "folder" / path.name
    whole.parent.mkdir()
    path.rename(whole)
    assert [d.text for d in documents(config(tmp_path, whole.parent))] == [text]


@given(st.integers(0, 3 * 128), st.booleans(), st.randoms(use_true_random=False))
@examples(40)
def test_the_documents_of_a_text_do_not_depend_on_its_compression(
    tmp_path_factory: pytest.TempPathFactory, sections: int, single: bool, draw: random.Random
):
    """Around the sizes at which a text is divided, and sections have their full size."""
    folder = tmp_path_factory.mktemp("texts")
    with pytest.MonkeyPatch.context() as patch:
        for module in (file_formats, file_readers):
            patch.setattr(module, "LONG_FILE_BYTES", 64 * 50)
        patch.setattr(file_readers, "SECTION_BYTES", 50)
        text = "".join("a" * draw.randrange(99) + "\n" for _ in range(sections)).encode()
        found = []
        for name, content in (("a.txt", text), ("a.txt.gz", gzip.compress(text))):
            path = folder / name / name
            path.parent.mkdir()
            path.write_bytes(content)
            read = documents(config(folder, path if single else path.parent)) if text else []
            found.append([document.text for document in read])
    assert found[0] == found[1]
    assert "".join(found[0]) == text.decode()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
DISAGREE = [
    ("train.txt", LINES, "plain text, but its content is JSON lines", "data.format=jsonl"),
    ("train", LINES, "has no known suffix, but its content is JSON lines", "data.format=jsonl"),
    ("train.log", LINES * 3, "known suffix, but its content is JSON lines", "data.format=text"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(LINES)), "is gzip data compr", "compressed twice"),
    ("blob.xz", lzma.compress(gzip.compress(LINES)), "is gzip data compressed", "once and keep"),
    ("blob", gzip.compress(LINES), "JSON lines compressed with gzip", "data.format=jsonl"),
    ("a.jsonl", gzip.compress(LINES), "its content is JSON lines compressed", r"to \*\.jsonl\.gz"),
    ("a.jsonl.gz", LINES, "compressed with gzip, but its content is JSON lines", "jsonl"),
    ("a.jsonl.zst", gzip.compress(LINES), "with zstandard, but .* with gzip", "data.format=jsonl"),
    ("a.jsonl", ARRAY, "its content is one JSON array", "data.format=json"),
    ("a.txt", ARRAY, "its content is one JSON array", "data.format=json"),
    ("a.jsonl", PROSE, "JSON lines, but its content is text", "data.format=text"),
    ("a.json", b"Once upon a time.\n", "but its content is other text", "data.format=text"),
    ("a.csv", LINES, "CSV, but its content is JSON lines", "data.format=jsonl"),
    ("a.txt", CSV.encode(), "plain text, but its content is CSV", "data.format=csv"),
    ("a.parquet", b"<!DOCTYPE html><html>", "Parquet, but its content is an HTML", "download"),
    ("a.jsonl", b"\n<html lang=en>Too many requests", "its content is an HTML page", "download"),
    ("a.txt", b"<!doctype html>\n<p>Not found", "its content is an HTML page", "download"),
    ("a.jsonl", LFS, "a pointer of Git LFS", "git lfs pull"), ("a.txt", LFS, "LFS", "git lfs pull"),
    ("a.parquet", b"/annex/objects/SHA256E-s1--0.parquet\n", "git-annex", "git annex get"),
    ("a.jsonl", tar(), "a tar archive", "tar -xf"),
    ("a.jsonl.gz", gzip.compress(tar()), "tar", "tar"),
    ("a.jsonl", zipped(), "a zip archive", "unzip"), ("a.txt", b"ARROW1\0\0", "Arrow", "convert"),
    ("a.jsonl", b"\x80\x04\x95abc.", "a Python pickle", "convert"),
    ("a.txt", b"MMIDIDX\0\0\1", "an index of Megatron", "convert"),
    ("a.jsonl", LINES.decode().encode("utf-16"), "UTF-16", "iconv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says", "todo"), DISAGREE)
def test_a_name_that_disagrees_with_the_content_is_refused(
    tmp_path: Path, name: str, content: bytes, says: str, todo: str
):
    path = tmp_path / "one" / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"(?s){name}: .*{says}.*\n  do: .*{todo}"):
        documents(config(tmp_path, path))
    (path.parent / "good.txt").write_text("a text\n" * 9)
    with pytest.raises(DataError, match=rf"(?s)one.*{name}: .*{says}.*\n  do: .*data.broken=skip"):
        documents(config(tmp_path, path.parent))
    found = documents(config(tmp_path, path.parent, broken="skip"))
    assert [d.name for d in found] == ["good.txt"]


def test_parquet_under_another_name_is_refused(tmp_path: Path):
    for name, content in (("a.jsonl", parquet()), ("b", parquet()), ("c.txt", parquet())):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=r"its content is Parquet\n  do: .*data.format=parquet"):
            documents(config(tmp_path, tmp_path / name))
        found = documents(config(tmp_path, tmp_path / name, format="parquet"))
        assert [d.text for d in found] == TEXTS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("play.txt", PROSE), ("notes", b"[1] A reference.\n[2] Another one.\n"),
        ("code.js", b"{\n  let a = {};\n}\n"), ("list.txt", b"[\n  a,\n  b\n]\n"),
        ("code.py", b"{'text': 1}\nprint({})\n"), ("a.html", b"<!DOCTYPE html>\n<p>Yes"),
        ("notebook.ipynb", b'{"cells": [],\n "metadata": {}}\n'), ("text", b"text\nof a book\n"),
    ],
)  # fmt: skip
def test_text_that_looks_like_records_at_first_is_text(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    assert "".join(d.text for d in documents(config(tmp_path, path))) == content.decode()


@pytest.mark.parametrize("name", ["train.txt", "train", "train.dat", "blob.bin"])
def test_data_format_overrules_the_name(tmp_path: Path, name: str):
    path = tmp_path / name
    for content in (LINES, gzip.compress(LINES)):
        path.write_bytes(content)
        assert [d.text for d in documents(config(tmp_path, path, format="jsonl"))] == TEXTS
        raw = documents(config(tmp_path, path, format="text"))
        assert "".join(d.text for d in raw) == LINES.decode()


def test_json_without_the_key_is_refused_unless_it_lies_beside_text(tmp_path: Path):
    root = tmp_path / "code"
    root.mkdir()
    (root / "package.json").write_text('{\n "name": "a",\n "version": 1\n}\n')
    for path in (root, root / "package.json"):
        with pytest.raises(
            DataError, match=r"first element has: name, version\).*\n  do: set data.text_"
        ):
            documents(config(tmp_path, path))
    (root / "main.c").write_text("int main() { return 0; }\n" * 50)
    assert [d.name for d in documents(config(tmp_path, root))] == ["main.c", "package.json"]


@given(
    values=st.lists(st.text() | st.none() | st.integers(), max_size=9),
    indent=st.none() | st.integers(0, 3),
    is_ascii=st.booleans(),
    read_bytes=st.integers(1, 30),
)
def test_a_json_array_is_read_as_a_stream(
    tmp_path_factory: pytest.TempPathFactory, values, indent, is_ascii, read_bytes
):
    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps([{"text": value} for value in values], indent=indent, ensure_ascii=is_ascii)
    path.write_bytes(text.encode(errors="replace"))
    wanted = [record["text"] for record in json.loads(path.read_bytes())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frontier_llm.data.file_readers.READ_BYTES", read_bytes)
        reader = JsonValues(path, path.stat().st_size, "", "text")
        found = [entry for cut in reader.scan().cuts for entry in reader.entries(cut)]
    assert [entry.place for entry in found] == list(range(len(values)))
    for entry, value in zip(found, wanted, strict=True):
        assert (entry.problem is None) == isinstance(value, str)
        if isinstance(value, str):
            assert entry.text == "".join(
                "\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value
            )


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "csv", "txt.gz"])
def test_a_line_without_an_end_is_refused_in_little_memory(
    tmp_path: Path, suffix: str, monkeypatch
):
    monkeypatch.setattr(source_format, "LONGEST_DOCUMENT_BYTES", 5000)
    monkeypatch.setattr("frontier_llm.data.file_readers.READ_BYTES", 1000)
    long = b"a" * 100_000
    content = b'{"text": "%s"}\n' % long + LINES
    if suffix == "json":
        content = b'[{"text": "%s"}]' % long
    elif suffix == "csv":
        content = b"id,text\n1,%s\n" % long
    elif suffix == "txt.gz":
        content = long
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    if suffix == "txt.gz":  # a text is divided
        assert "".join(d.text for d in documents(config(tmp_path, path))).encode() == content
        return
    with pytest.raises(DataError, match=r"is longer than 4.88 KiB"):
        documents(config(tmp_path, path))
    if suffix.startswith("jsonl"):
        assert [d.text for d in documents(config(tmp_path, path, broken="skip"))] == TEXTS


@given(head=st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_any_content_has_a_format_or_a_problem(
    tmp_path_factory: pytest.TempPathFactory, head: bytes
):
    path = tmp_path_factory.mktemp("any") / "a.json"
    path.write_bytes(head)
    found = detect(path, "text")
    assert found.format is not None or found.problem is not None
