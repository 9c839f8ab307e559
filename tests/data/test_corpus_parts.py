"""Parts, formats, duplicates and skipped texts of frontier-llm preprocess."""

import bz2
import gzip
import json
import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from frontier_llm.config.data import DataConfig
from frontier_llm.data import (
    corpus_parts,
    file_formats,
    file_readers,
    worker_pool,
)
from frontier_llm.data.corpus_manifest import BROKEN, EMPTY, MANIFEST_FILE, OTHER_FORMAT
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import open_corpus
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config, documents, source_of, write_jsonl
from tests.patience import wait_until


@pytest.fixture
def small_parts(monkeypatch):
    """Make parts and cuts so small that a small corpus has many."""
    monkeypatch.setattr(corpus_parts, "PART_BYTES", 3000)
    monkeypatch.setattr(file_readers, "CUT_BYTES", 1000)
    monkeypatch.setattr(file_readers, "READ_BYTES", 700)


def mixed_folder(root: Path, kind: str) -> Path:
    """Write files of all formats of records, or of text, that need no optional package."""
    root.mkdir()
    draw = random.Random(5)
    lines = [" ".join(draw.choices(["zwölf", "birds", "sang", "雪"], k=9)) for _ in range(900)]
    if kind == "records":
        write_jsonl(root / "a.jsonl", 180)
        (root / "b.jsonl.gz").write_bytes(gzip.compress(write_jsonl(root / "x", 60).read_bytes()))
        (root / "x").unlink()
        (root / "c.csv").write_text("n,text\n" + "".join(f'1,"{line}"\n' for line in lines))
        (root / "d.json").write_text(json.dumps([{"text": line} for line in lines[:50]]))
        return root
    (root / "c.txt").write_text("\n\n".join(lines))
    (root / "c.txt.bz2").write_bytes(bz2.compress("\n\n".join(lines).encode()))
    for number in range(40):
        (root / f"d{number:02d}.md").write_text(f"note {number}\n" * 20)
    return root


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["records", "text"])
def test_the_result_does_not_depend_on_the_workers(
    tmp_path: Path, small_parts, monkeypatch, folder: Path, kind: str
):
    model = str(folder / "tokenizer.model")
    monkeypatch.setattr(file_formats, "LONG_FILE_BYTES", 10_000)
    text = mixed_folder(tmp_path / "text", kind)
    settings = config(tmp_path / "one", text, unique=True, tokenizer=model)
    one = prepare(settings, workers=1)
    assert len(documents_in_parts(settings)) > 10
    for count in (2, 5):
        again = config(tmp_path / str(count), text, unique=True, tokenizer=model)
        other = prepare(again, workers=count)
        assert other.name == one.name
        assert content(other) == content(one)


@pytest.mark.parametrize("kind", ["records", "text"])
def test_the_result_does_not_depend_on_the_parts(tmp_path: Path, monkeypatch, kind: str):
    text = mixed_folder(tmp_path / "text", kind)
    whole = prepare(config(tmp_path / "one", text), workers=1)
    monkeypatch.setattr(corpus_parts, "PART_BYTES", 500)
    monkeypatch.setattr(file_readers, "CUT_BYTES", 300)
    monkeypatch.setattr(file_readers, "READ_BYTES", 200)
    assert content(prepare(config(tmp_path / "two", text), workers=2)) == content(whole)


def test_the_files_are_those_that_megatron_writes(tmp_path: Path, small_parts):
    folder = prepare(config(tmp_path / "c", write_jsonl(tmp_path / "text.jsonl")), workers=2)
    for name in ("train", "validation"):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for tokens in IndexedDataset(str(folder / name)):
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        for suffix in (".bin", ".idx"):
            written = (folder / name).with_suffix(suffix).read_bytes()
            assert written == (tmp_path / name).with_suffix(suffix).read_bytes()


def test_killed_work_continues_from_the_finished_parts(
    tmp_path: Path, small_parts, monkeypatch, folder: Path
):
    text = write_jsonl(tmp_path / "text.jsonl", 400)
    model = str(folder / "tokenizer.model")
    settings = config(tmp_path / "c", text, tokenizer=model)
    write = corpus_parts.PartWriter.write
    notes = partial(tmp_path.glob, "c/.tiny-*.partial/*.json")

    def write_slowly(*args: Any) -> None:
        write(*args)
        time.sleep(1 if len(list(notes())) >= 5 else 0)  # the kill comes in the middle

    parent = os.fork()
    if not parent:
        os.setsid()
        corpus_parts.PartWriter.write = write_slowly
        prepare(settings, workers=2)
        os._exit(0)
    wait_until(lambda: len(list(notes())) >= 5, "five parts")
    os.kill(parent, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    # its workers exit when their pipes are closed
    wait_until(lambda: not _runs_in_session(parent), "the end of the workers")
    done = list(notes())
    before = {path: path.stat().st_mtime_ns for path in done}
    written = []
    monkeypatch.setattr(
        corpus_parts.PartWriter, "write", lambda self, part: written.append(write(self, part))
    )
    found = prepare(settings, workers=1)
    assert 0 < len(written) <= len(documents_in_parts(settings)) - len(before)
    fresh = config(tmp_path / "fresh", text, tokenizer=model)
    assert content(found) == content(prepare(fresh, workers=1))
    assert not list((tmp_path / "c").glob("*.partial"))


def documents_in_parts(settings: DataConfig) -> list[corpus_parts.Part]:
    source = source_of(settings)
    return corpus_parts.plan_parts([source.scan(index) for index in range(len(source.files))])


def _runs_in_session(session: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                return True
    return False


def test_a_killed_worker_is_reported_and_finished_parts_are_kept(
    tmp_path: Path, small_parts, monkeypatch
):
    text = write_jsonl(tmp_path / "text.jsonl", 400)
    parent = os.getpid()
    note = corpus_parts.PartFiles.note

    def die_once(self, number):
        if number == 6 and os.getpid() != parent and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return note(self, number)

    monkeypatch.setattr(corpus_parts.PartFiles, "note", die_once)
    settings = config(tmp_path / "c", text)
    with pytest.raises(DataError, match=r"a worker process was killed.*out of memory\?\n  do: "):
        prepare(settings, workers=2)
    assert list(tmp_path.glob("c/.tiny-*.partial/*.json"))
    open_corpus(prepare(settings, workers=2), verify=True)


def test_an_error_of_a_worker_is_raised_in_the_parent():
    def work(job: int) -> int:
        if job == 3:
            raise DataError("job 3 is bad")
        return job * job

    with pytest.raises(DataError, match="job 3 is bad"):
        list(worker_pool.run_jobs(work, range(100), 3))
    assert dict(worker_pool.run_jobs(work, range(3), 3)) == {0: 0, 1: 1, 2: 4}
    assert list(worker_pool.run_jobs(work, [], 3)) == []


def test_the_first_of_equal_documents_is_kept(tmp_path: Path, small_parts, monkeypatch):
    monkeypatch.setattr(corpus_parts, "ROUND_DOCUMENTS", 50)
    path = tmp_path / "text.jsonl"
    texts = [f"document {number % 70} of the river" for number in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = config(tmp_path / "c", path, unique=True)
    corpus = open_corpus(prepare(settings, workers=2), verify=True)
    manifest = corpus.manifest
    assert manifest.account.repeated_documents == 230
    assert manifest.train.documents + manifest.validation.documents == 70
    firsts = documents(settings)[:70]
    for name, side in (("train", False), ("validation", True)):
        stream = IndexedDataset(str(tmp_path / "c" / path_name(tmp_path) / name))
        kept = [corpus.tokenizer.decode(tokens.tolist()) for tokens in stream]
        assert kept == [d.text for d in firsts if d.is_validation(10) is side]


def path_name(tmp_path: Path) -> str:
    (folder,) = tmp_path.glob("c/tiny-*")
    return folder.name


def test_skipped_texts_are_counted_and_named(tmp_path: Path):
    root = tmp_path / "text"
    root.mkdir()
    write_jsonl(root / "a.jsonl", 60)
    with (root / "a.jsonl").open("ab") as stream:
        stream.write(b'{"text": ""}\n{"body": "x"}\n\n{"text": "\xff"}\n{"text": 3}\nno json\n')
    account = open_corpus(prepare(config(tmp_path / "c", root, broken="skip"))).manifest.account
    assert (account.found.files, account.read.files) == (1, 1)
    assert (account.empty_documents, account.broken_documents) == (1, 4)
    assert account.documents == 65
    examples = "\n".join(account.examples)
    for what in (
        "a.jsonl:62: no text under the key 'text' (this line has: body)",
        "a.jsonl:64: this line is not UTF-8", "a.jsonl:66: this line is not JSON",
    ):  # fmt: skip
        assert what in examples
    with pytest.raises(DataError, match=r"(?s)a\.jsonl:62: no text under.*\n  do: .*broken=skip"):
        prepare(config(tmp_path / "c", root))


def test_files_without_text_are_counted_and_named(tmp_path: Path):
    root = tmp_path / "text"
    root.mkdir()
    (root / "a.txt").write_text("a river\n\n" * 50_000)
    (root / "b.bin").write_bytes(b"\x00\x01")
    (root / "c.txt").write_bytes("früh".encode("latin-1"))
    (root / "d.txt").write_bytes(b"")
    for chosen in ("auto", "mixed"):
        corpus = prepare(config(tmp_path / chosen, root, broken="skip", format=chosen))
        left_out = open_corpus(corpus).manifest.account.left_out
        other, empty, broken = (left_out[why] for why in (OTHER_FORMAT, EMPTY, BROKEN))
        assert (other.files, other.bytes, empty.files, empty.bytes) == (1, 2, 1, 0)
        assert other.examples == ["b.bin (not UTF-8 text: null byte at byte 0)"]
        (example,) = broken.examples
        assert example.startswith("c.txt (not UTF-8 text: invalid")


@pytest.mark.parametrize("chosen", ["auto", "mixed", "text"])
def test_a_small_text_in_another_encoding_is_not_left_out(tmp_path: Path, chosen: str):
    """However small its share is, and whatever the format was said to be."""
    root = tmp_path / "text"
    root.mkdir()
    (root / "a.txt").write_text("a river\n\n" * 50_000)
    (root / "c.txt").write_bytes("früh".encode("latin-1"))
    with pytest.raises(DataError, match=r"(?s)c\.txt: not UTF-8.*\n  do: .*iconv.*broken=skip"):
        prepare(config(tmp_path / "c", root, format=chosen))


@pytest.mark.parametrize("text", ["a river\n\n" * 9, "Река и лес, лес и река.\n" * 9])
@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE"])
def test_utf_16_without_a_mark_is_named(tmp_path: Path, text: str, encoding: str):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=rf"it may be UTF-16 \(iconv -f {encoding} -t utf-8\)"):
        prepare(config(tmp_path / "c", path))
    path.write_bytes(bytes(9) + text.encode())
    with pytest.raises(DataError, match=r"null byte at byte 0\n"):
        prepare(config(tmp_path / "c", path))


def test_broken_bytes_deep_in_a_long_text_are_named(tmp_path: Path):
    path = tmp_path / "book.txt"
    good = "A paragraph of a book.\n\n" * 3000
    path.write_bytes(good.encode() + b"na\xefve\n\n" + good.encode())
    with pytest.raises(DataError, match=rf"book\.txt#\d+: not UTF-8.*at byte {len(good) + 2}"):
        prepare(config(tmp_path / "c", path))
    manifest = open_corpus(prepare(config(tmp_path / "c", path, broken="skip"))).manifest
    assert manifest.account.broken_documents == 1
    assert manifest.train.documents > 100


def test_a_very_long_document_is_not_split(tmp_path: Path):
    path = write_jsonl(tmp_path / "text.jsonl", 50)
    long = "one very long line without an end " * 60_000
    with path.open("a") as stream:
        stream.write(json.dumps({"text": long}) + "\n")
    corpus = open_corpus(prepare(config(tmp_path / "c", path)))
    streams = (corpus.train, corpus.validation)
    texts = [corpus.tokenizer.decode(stream.read(0, len(stream)).tolist()) for stream in streams]
    assert sum(long in text for text in texts) == 1


def test_damaged_gzip_is_named(tmp_path: Path):
    path = tmp_path / "text.jsonl.gz"
    packed = gzip.compress(write_jsonl(tmp_path / "x").read_bytes())
    path.write_bytes(packed[:-200])
    with pytest.raises(DataError, match=r"text\.jsonl\.gz: it is damaged: .*\n  do: "):
        prepare(config(tmp_path / "c", path))


def test_compressed_and_plain_lines_are_the_same_documents(tmp_path: Path):
    plain = write_jsonl(tmp_path / "text.jsonl")
    packed = tmp_path / "text.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    texts = [d.text for d in documents(config(tmp_path, plain))]
    assert [d.text for d in documents(config(tmp_path, packed))] == texts
    zstandard = pytest.importorskip("zstandard")
    packed = tmp_path / "text.jsonl.zst"
    frames = plain.read_bytes().splitlines(keepends=True)
    halves = (b"".join(frames[:90]), b"".join(frames[90:]))
    packed.write_bytes(b"".join(zstandard.compress(half) for half in halves))
    assert [d.text for d in documents(config(tmp_path, packed))] == texts
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(DataError, match="is damaged"):
        documents(config(tmp_path, packed))


def test_parquet_has_one_document_per_row(tmp_path: Path, small_parts):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "text.parquet"
    texts = [f"row {number} of the table" for number in range(500)]
    table = pyarrow.table({"body": texts, "n": list(range(500))})
    parquet.write_table(table, path, row_group_size=60)
    settings = config(tmp_path / "c", path, text_key="body")
    assert [d.text for d in documents(settings)] == texts
    assert documents(settings)[70].name == "text.parquet:70"
    open_corpus(prepare(settings, workers=2), verify=True)
    with pytest.raises(DataError, match=r"no column 'text' \(it has: body, n\)\n  do: set data"):
        documents(config(tmp_path / "c", path))
    with pytest.raises(DataError, match=r":0: the column 'n' holds a number, no text"):
        documents(config(tmp_path / "c", path, text_key="n"))


def test_a_given_tokenizer_is_used_and_a_bad_one_refused(tmp_path: Path, folder: Path):
    text = write_jsonl(tmp_path / "text.jsonl", 90)
    model = folder / "tokenizer.model"
    corpus = open_corpus(prepare(config(tmp_path / "c", text, tokenizer=str(model))))
    assert corpus.manifest.tokenizer_sha256 == open_corpus(folder).manifest.tokenizer_sha256
    for bad in (tmp_path / "absent.model", text):
        with pytest.raises(ConfigError, match=r"data\.tokenizer"):
            prepare(config(tmp_path / "c", text, tokenizer=str(bad)))


def test_files_and_places_are_listed_for_all_documents(tmp_path: Path):
    root = mixed_folder(tmp_path / "text", "records")
    folder = prepare(config(tmp_path / "c", root))
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    lines = [json.loads(line) for line in (folder / "files.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == sorted(path.name for path in root.iterdir())
    for split in ("train", "validation"):
        assert sum(line[split] for line in lines) == manifest[split]["documents"]
        places = np.fromfile(folder / f"{split}.places", dtype=np.int64)
        assert len(places) == manifest[split]["documents"]
