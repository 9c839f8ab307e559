"""Files that are written to while a corpus is prepared from them are refused.

The tests change a file in the callback that reports progress, so that they depend on no moment.
"""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from frontier_llm.data.corpora import prepare_all
from frontier_llm.data.corpus_build import CorpusBuild, scan_files
from frontier_llm.data.corpus_parts import PartFiles
from frontier_llm.data.prepare import prepare
from frontier_llm.data.tokenizer_source import MODEL_FILE, copy_tokenizer, open_tokenizer
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config, source_of, write_jsonl
from tests.data.test_file_formats import parquet, zstandard

STAGES = ["reading", "choosing", "training", "tokenising", "merging"]
LINES = "".join(f'{{"text": "document {n} of many"}}\n' for n in range(200)).encode()
TEXT = "".join(f"paragraph {n} of the book\n\n" for n in range(2000)).encode()
ROWS = b"text\n" + TEXT.replace(b"\n\n", b"\n")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"o", b"a"))


def exchange(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"o", b"a"))
    other.replace(path)


def at(stage: str, change: Callable[[], object]) -> Callable[[str, float], None]:
    """Return a callback of progress that runs `change` once, when a stage begins."""
    seen = set[str]()

    def show(shown: str, fraction: float) -> None:
        if shown.startswith(stage) and stage not in seen:
            seen.add(stage)
            change()

    return show


def refuse(directory: Path, path: Path, stage: str, change: Callable[[Path], object]) -> str:
    """Prepare a path, change its file `text*` at a stage, and return the error."""
    (file,) = [path] if path.is_file() else path.glob("text*")
    os.utime(file, (1, 1))
    with pytest.raises(DataError) as caught:
        prepare(config(directory, path), at(stage, lambda: change(file)), workers=1)
    left = {entry.suffix for entry in directory.iterdir()}
    assert left <= {".lock"}, "nothing looks like a corpus"
    error = str(caught.value)
    assert error.startswith("the text changed while a corpus was prepared:\n")
    assert f"{file}: it was " in error
    assert "\n  do: start again when nothing writes to it" in error
    return error


@pytest.mark.parametrize("change", [truncate, append, rewrite, exchange, Path.unlink])
@pytest.mark.parametrize("stage", STAGES)
def test_a_text_that_changes_is_refused_at_any_stage(tmp_path: Path, stage: str, change):
    error = refuse(tmp_path / "corpora", write_jsonl(tmp_path / "text.jsonl"), stage, change)
    assert ("and is gone" in error) == (change is Path.unlink)
    assert prepare(config(tmp_path / "again", write_jsonl(tmp_path / "text.jsonl")))


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.txt", lambda: TEXT),
        ("text.csv", lambda: ROWS),
        ("text.json", lambda: b"[" + LINES.replace(b"\n", b",")[:-1] + b"]"),
        ("text.parquet", lambda: parquet(copies=50)),
        ("text.jsonl.gz", lambda: gzip.compress(LINES)),
        ("text.txt.zst", lambda: zstandard(TEXT)),
    ],
    ids=["txt", "csv", "json", "parquet", "gzip", "zstandard"],
)
def test_a_text_of_any_format_that_changes_is_refused(
    tmp_path: Path, name: str, content: Callable[[], bytes], in_folder: bool
):
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / name
    for change in (truncate, append):
        path.write_bytes(content())
        refuse(tmp_path / "corpora", path.parent if in_folder else path, "tokenising", change)


def test_a_text_behind_a_link_that_changes_is_refused(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    target = write_jsonl(tmp_path / "target.jsonl")
    (tmp_path / "texts" / "text.jsonl").symlink_to(target)
    refuse(tmp_path / "corpora", tmp_path / "texts", "tokenising", lambda link: truncate(target))


def test_a_former_text_does_not_give_the_corpus_of_a_later_one(tmp_path: Path):
    path = write_jsonl(tmp_path / "text.jsonl")
    text, settings = path.read_bytes(), config(tmp_path / "corpora", path)
    rewrite(path)
    prepare(settings)
    path.write_bytes(text)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match="the text changed"):
        prepare(settings, at("reading", lambda: rewrite(path)), workers=1)


def test_what_is_not_read_may_change(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts" / "text.jsonl")
    note = tmp_path / "texts" / "README.md"
    note.write_text("About this text.")
    assert prepare(config(tmp_path / "corpora", note.parent), at("tokenising", note.unlink))
    assert not note.exists()


def test_a_file_that_vanishes_counts_as_broken_where_that_is_skipped(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        write_jsonl(tmp_path / "texts" / f"{name}.jsonl")
    settings = config(tmp_path / "corpora", tmp_path / "texts", broken="skip")
    source, show = source_of(settings), lambda stage, fraction: None
    (tmp_path / "texts" / "b.jsonl").unlink()
    _, lost = scan_files(source, settings, 1, show)
    assert not lost.cuts
    assert "No such file" in lost.problem


def test_a_part_whose_text_changed_is_not_marked_as_done(tmp_path: Path, folder: Path):
    """Else a later preparation, of the former text, would go on with it."""
    path = write_jsonl(tmp_path / "text.jsonl")
    os.utime(path, (1, 1))
    settings = config(tmp_path, path)
    source, show = source_of(settings), lambda stage, fraction: None
    scans = scan_files(source, settings, 1, show)
    build = CorpusBuild(settings.sources[0], settings, source, scans, 1, show)
    rewrite(path)
    with pytest.raises(DataError, match="the text changed"):
        build.tokenise(open_tokenizer(folder), PartFiles(tmp_path))
    assert not PartFiles(tmp_path).is_done(0)


def test_a_changing_text_of_a_blend_gives_no_tokenizer(tmp_path: Path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl") for name in "ab"]
    os.utime(paths[1], (1, 1))
    corpora = [{"name": path.stem, "path": str(path)} for path in paths]
    settings = config(tmp_path / "corpora", None, kind="blend", corpora=corpora)
    with pytest.raises(DataError, match=r"b\.jsonl: it was"):
        prepare_all(settings, at("choosing", lambda: truncate(paths[1])), workers=1)
    assert not (tmp_path / "corpora").exists()


def test_a_tokenizer_that_changes_is_refused(tmp_path: Path, folder: Path):
    path = write_jsonl(tmp_path / "text.jsonl")
    other = prepare(config(tmp_path / "other", path, vocabulary=300))
    given = copy_tokenizer(folder, tmp_path)
    settings = config(tmp_path / "corpora", path, tokenizer=str(given))
    change = at("reading", lambda: given.write_bytes((other / MODEL_FILE).read_bytes()))
    with pytest.raises(ConfigError, match=r"data\.tokenizer(.|\n)*nothing writes(.|\n)*start"):
        prepare(settings, change, workers=1)
    assert {entry.suffix for entry in (tmp_path / "corpora").iterdir()} == {".lock"}
