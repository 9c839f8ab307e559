import gzip
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from frontier_llm.config.reading import check_sources
from frontier_llm.data import prepare as module
from frontier_llm.data.corpora import open_all
from frontier_llm.data.corpus_manifest import FILES_FILE
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import open_corpus
from frontier_llm.data.source import Document, Source
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config, documents, write_jsonl
from tests.patience import patient


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "text.jsonl")


def test_every_document_comes_back_from_its_split(tmp_path: Path, text: Path):
    settings = config(tmp_path / "corpora", text)
    folder = prepare(settings)
    corpus = open_corpus(folder, verify=True)
    wanted: dict[str, list[str]] = {"train": [], "validation": []}
    for document in documents(settings):
        wanted["validation" if document.is_validation(10) else "train"].append(document.text)
    for name, texts in wanted.items():
        stored = IndexedDataset(str(folder / name))
        assert all(tokens[-1] == corpus.tokenizer.eod for tokens in stored)
        assert [corpus.tokenizer.decode(tokens.tolist()) for tokens in stored] == texts
        split = getattr(corpus.manifest, name)
        assert split.documents == len(texts) == len(stored.document_indices) - 1
        assert split.tokens == sum(map(len, stored))
        assert split.text_bytes == sum(len(text.encode()) for text in texts)
    assert corpus.manifest.pieces == corpus.tokenizer.vocabulary <= 400
    assert folder.name == f"tiny-{folder.name[-12:]}"


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(DType, "optimal_dtype", lambda cardinality: np.int32)
    corpus = open_corpus(prepare(config(tmp_path, write_jsonl(tmp_path / "text.jsonl"))))
    assert corpus.manifest.dtype == "int32"
    assert corpus.train.read(0, 3).dtype == np.int32


def test_the_tokenizer_of_a_long_corpus_is_trained_on_a_sample(
    tmp_path: Path, text: Path, monkeypatch
):
    whole = open_corpus(prepare(config(tmp_path / "whole", text)))
    monkeypatch.setattr(module, "TOKENIZER_TEXT_BYTES", text.stat().st_size // 10)
    part = open_corpus(prepare(config(tmp_path / "part", text)))
    assert part.manifest.tokenizer_sha256 != whole.manifest.tokenizer_sha256
    assert part.manifest.train.documents == whole.manifest.train.documents


def test_unchanged_sources_are_not_read_again(tmp_path: Path, text: Path, monkeypatch):
    settings = config(tmp_path / "corpora", text)
    folder = prepare(settings)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr(Source, "scan", None)
    assert prepare(settings) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_touched_sources_give_the_same_folder(tmp_path: Path, text: Path, monkeypatch):
    settings = config(tmp_path / "corpora", text)
    folder = prepare(settings)
    os.utime(text, (1, 1))
    monkeypatch.setattr(Source, "entries", None)
    assert prepare(settings) == folder


def test_changed_sources_or_settings_give_another_folder(tmp_path: Path, text: Path):
    folders = {prepare(config(tmp_path / "corpora", text))}
    folders.add(prepare(config(tmp_path / "corpora", text, vocabulary=290)))
    folders.add(prepare(config(tmp_path / "corpora", text, validation_percent=30.0)))
    with text.open("a") as stream:
        stream.write('{"text": "one more document"}\n')
    folders.add(prepare(config(tmp_path / "corpora", text)))
    assert len(folders) == 4
    assert len({open_corpus(folder).manifest.digest for folder in folders}) == 4
    # settings of the training alone change nothing
    assert prepare(config(tmp_path / "corpora", text, sequence_length=99)) in folders


def test_the_digest_depends_on_what_is_prepared_not_on_where(tmp_path: Path, text: Path):
    one = open_corpus(prepare(config(tmp_path / "one", text)))
    other = open_corpus(prepare(config(tmp_path / "two", text, name="other")))
    assert one.manifest.digest == other.manifest.digest


def test_a_deleted_folder_is_prepared_again(tmp_path: Path, text: Path):
    settings = config(tmp_path / "corpora", text)
    folder = prepare(settings)
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"manifest\.json is damaged: No such file"):
        prepare(settings)
    folder.rmdir()
    assert prepare(settings) == folder
    open_corpus(folder, verify=True)


def _prepare_and_report(settings, barrier, results):
    stages: list[str] = []
    barrier.wait()
    folder = prepare(settings, lambda stage, fraction: stages.append(stage))
    results.put((folder, stages))


@pytest.mark.parametrize(("words", "warns"), [(18_000, True), (300_000, False)])
def test_a_split_by_few_long_documents_is_warned_of(tmp_path: Path, words: int, warns: bool):
    """A text without blank lines is cut into pieces of 64 KiB, and few pieces divide badly."""
    path = tmp_path / "line11.txt"  # the longer of its two pieces is for validation
    path.write_text(" ".join(random.Random(0).choices(["river", "stone", "of", "42"], k=words)))
    settings = config(tmp_path / "corpora", path)
    corpora = open_all(settings, [prepare(settings)])
    (corpus,) = corpora.corpora
    train, validation = corpus.manifest.train.tokens, corpus.manifest.validation.tokens
    share = f"{validation / (train + validation):.0%} of the tokens are for validation"
    assert [text.partition(", at data.")[0] for _, text in corpora.warnings] == [share] * warns


@pytest.mark.parametrize("locks", [True, False])
def test_two_processes_at_once_prepare_one_corpus(
    tmp_path: Path, text: Path, locks: bool, monkeypatch
):
    if not locks:
        monkeypatch.setattr(module.fcntl, "flock", _no_locks)
    settings = config(tmp_path / "corpora", text)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_prepare_and_report, args=(settings, barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=patient(30)) for _ in processes]
    for process in processes:
        process.join(patient(30))
    assert [process.exitcode for process in processes] == [0, 0]
    assert found[0][0] == found[1][0]
    open_corpus(found[0][0], verify=True)
    assert [path.name for path in (tmp_path / "corpora").glob("*partial*")] == []
    trained = sum(any("training a tokenizer" in stage for stage in stages) for _, stages in found)
    assert trained == 1 if locks else trained >= 1


class _WaitsError(Exception):
    pass


def test_only_the_same_text_is_waited_for(tmp_path: Path, text: Path, monkeypatch):
    other = config(tmp_path / "corpora", write_jsonl(tmp_path / "other.jsonl", 150))
    settings, free = config(tmp_path / "corpora", text), module.fcntl.flock

    def flock(stream, operation):
        free(stream, operation | module.fcntl.LOCK_NB)

    def note(of):
        (corpus,) = of.sources
        return module._Preparation(corpus, of).note(module.find_source(corpus, of))

    def show(stage, fraction):
        if stage.startswith("waiting"):
            raise _WaitsError

    folder = prepare(other)
    shutil.rmtree(folder)
    monkeypatch.setattr(module.fcntl, "flock", flock)
    with module._lock(note(settings), show):
        assert prepare(other, show) == folder
        with pytest.raises(_WaitsError):
            prepare(settings, show)
    folder = prepare(settings)
    shutil.rmtree(folder)
    os.utime(text, (1, 1))  # another note, the same folder
    with module._lock(folder.with_name(f".{folder.name}"), show), pytest.raises(_WaitsError):
        prepare(settings, show)


def test_without_locks_no_process_touches_the_parts_of_another(
    tmp_path: Path, text: Path, monkeypatch
):
    monkeypatch.setattr(module.fcntl, "flock", _no_locks)
    settings = config(tmp_path / "corpora", text)
    first = prepare(settings)
    of_another = first.with_name(f".{first.name}.partial")
    of_another.mkdir()
    (of_another / "00000.draft").write_text("half a note")
    shutil.rmtree(first)
    assert prepare(settings) == first
    assert (of_another / "00000.draft").read_text() == "half a note"


def _no_locks(stream, operation):
    raise OSError(module.errno.ENOLCK, "No locks available")


def test_progress_goes_from_zero_to_one_in_each_stage(tmp_path: Path, text: Path):
    fractions_by_stage: dict[str, list[float]] = {}
    prepare(
        config(tmp_path, text),
        lambda stage, fraction: fractions_by_stage.setdefault(stage, []).append(fraction),
    )
    assert [what.split()[0] for what in fractions_by_stage] == [
        "reading",
        "choosing",
        "training",
        "tokenising",
        "merging",
    ]
    for what, shares in fractions_by_stage.items():
        assert shares == sorted(shares)
        assert shares[0] == 0, "a stage is shown before its first file is done"
        assert all(0 <= share <= 1 for share in shares)
        if not what.startswith("training"):
            assert shares[-1] == 1


def test_a_failure_leaves_nothing_behind(tmp_path: Path, text: Path):
    with text.open("a") as stream:
        stream.write('{"body": "no text"}\n')
    directory = tmp_path / "corpora"
    with pytest.raises(DataError, match=r"text.jsonl:201: no text under the key 'text'"):
        prepare(config(directory, text))
    assert {path.suffix for path in directory.iterdir()} == {".lock"}


def test_old_work_of_killed_processes_is_removed(tmp_path: Path, text: Path):
    old, young = tmp_path / ".tiny-old.partial", tmp_path / ".tiny-young.partial"
    for folder in (old, young):
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"x")
    ago = time.time() - module.STALE_SECONDS - 1
    os.utime(old, (ago, ago))
    prepare(config(tmp_path, text))
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize(("documents", "percent"), [(1, 40.0), (3, 0.001), (2, 30.0)])
def test_an_empty_split_is_refused(tmp_path: Path, documents: int, percent: float):
    text = write_jsonl(tmp_path / "text.jsonl", documents)
    with pytest.raises(DataError, match=r"both need some\. A hash.*\n  do: add text, to") as caught:
        prepare(config(tmp_path / "corpora", text, validation_percent=percent))
    _, _, advised = str(caught.value).partition("or set data.validation_percent=")
    assert advised == {3: "29.2"}.get(documents, "")  # the others need 73.9 or more
    if advised:
        prepare(config(tmp_path / "corpora", text, validation_percent=float(advised)))


@pytest.mark.parametrize("names", [("a.txt", "b.txt.gz"), ("x.txt",), ("b.txt", "c.md.gz")])
def test_a_folder_of_few_texts_has_both_splits(tmp_path: Path, names: tuple[str, ...]):
    """A folder whose files would divide badly into splits is divided as a single file is."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in names:
        lines = "".join(f"{name} {number}\n" * 9 + "\n" for number in range(2000)).encode()
        (texts / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    for percent in (1.0, 10.0, 40.0):
        manifest = open_corpus(
            prepare(config(tmp_path, texts, validation_percent=percent))
        ).manifest
        count = manifest.train.documents + manifest.validation.documents
        assert count > 50 * len(names)
        wanted = pytest.approx(count * percent / 100, rel=0.5, abs=3)
        assert manifest.validation.documents == wanted


@pytest.mark.parametrize("book", ["book", "a", "b", "c"])
def test_a_book_beside_small_files_is_in_both_splits(tmp_path: Path, book: str):
    """A hash of its name puts `book` whole into the validation split."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("README.md", "LICENSE.txt"):
        (texts / name).write_text("About this book.\n" * 30)
    (texts / book).write_text("".join(f"paragraph {n} of the book\n\n" for n in range(20_000)))
    manifest = open_corpus(prepare(config(tmp_path, texts))).manifest
    share = manifest.validation.tokens / (manifest.train.tokens + manifest.validation.tokens)
    assert 0 < share < 0.2
    assert manifest.warnings(5.0) == []


def test_small_files_beside_a_long_one_stay_whole(tmp_path: Path):
    sources = tmp_path / "sources"
    sources.mkdir()
    for number in range(60):
        (sources / f"{number}.py").write_text(f"def f{number}():\n    pass\n\n\n" * 20)
    big = next(name for n in range(999) if Document(name := f"big{n}.py", "").is_validation(5.0))
    (sources / big).write_text("def g():\n    pass\n\n\n" * 1500)
    folder = prepare(config(tmp_path, sources))
    files = [json.loads(line) for line in (folder / FILES_FILE).read_text().splitlines()]
    documents = {file["name"]: file["train"] + file["validation"] for file in files}
    assert documents.pop(big) > 20
    assert set(documents.values()) == {1}
    assert open_corpus(folder).manifest.warnings(5.0) == []


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path, text: Path):
    (tmp_path / "corpora").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write a corpus to .*corpora.*\n  do: free space"):
        prepare(config(tmp_path / "corpora", text))


@pytest.mark.parametrize("name", ["../other", "", "..", ".hidden"])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path, text: Path, name: str):
    with pytest.raises(ConfigError, match=r"data\.name"):
        check_sources(config(tmp_path, text, name=name))
    corpora = [{"name": "a", "path": str(text)}, {"name": name, "path": str(text)}]
    with pytest.raises(ConfigError, match=r"data\.corpora"):
        check_sources(config(tmp_path, None, kind="blend", corpora=corpora))


@pytest.fixture
def full_disk(tmp_path: Path):
    point = tmp_path / "disk"
    point.mkdir()
    options = ["-t", "tmpfs", "-o", "size=16k", "tmpfs"]
    if subprocess.run(["mount", *options, str(point)], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk here")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_a_full_disk_is_named_and_left_clean(full_disk: Path, text: Path):
    with pytest.raises(DataError, match=r"No space left on device\n  do: free space"):
        prepare(config(full_disk, text))
    assert not list(full_disk.glob("*partial*"))
    assert not list(full_disk.glob("tiny-*"))


def test_the_standard_library_is_ready_at_once_the_next_time(tmp_path: Path):
    settings = config(tmp_path, None, kind="stdlib", name="stdlib", vocabulary=1000)
    folder = prepare(settings)
    stages: list[str] = []
    assert prepare(settings, lambda stage, fraction: stages.append(stage)) == folder
    assert stages == []
    corpus = open_corpus(folder)
    assert corpus.manifest.pieces == 1000
    assert corpus.manifest.train.tokens > 5 * corpus.manifest.validation.tokens > 500_000
    text = corpus.tokenizer.decode(corpus.train.read(0, 1000).tolist())
    assert "import" in text
