"""Links, files beside a data set, and the account of what is left out."""

import errno
import gzip
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.commands.preprocess import account_rows
from frontier_lab.convert import theirs
from frontier_lab.convert.ours import write_weights
from frontier_lab.sweeps.sweep_trials import Trial
from frontier_llm.config import decode
from frontier_llm.config.reading import check_files, check_sources
from frontier_llm.data import file_formats
from frontier_llm.data.corpora import open_all, prepare_all
from frontier_llm.data.corpus_manifest import (
    BESIDE,
    BROKEN,
    EMPTY,
    FILES_FILE,
    HIDDEN,
    MANIFEST_FILE,
    OTHER_FORMAT,
    OWN,
    REPEATED,
    Account,
    Manifest,
)
from frontier_llm.data.prepare import find_prepared, prepare
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.saving import run_directory
from tests.data.conftest import config, documents, write_jsonl
from tests.properties import examples
from tests.values import tiny_values


def manifest_of(tmp_path: Path, root: Path, **changes: object) -> Manifest:
    values = {"vocabulary": 262, "validation_percent": 40.0, **changes}
    folder = prepare(config(tmp_path / "corpora", root, **values), workers=1)
    return Manifest.load(folder / MANIFEST_FILE)


def account_of(tmp_path: Path, root: Path, **changes: object) -> Account:
    account = manifest_of(tmp_path, root, **changes).account
    assert account is not None
    return account


def cache(root: Path) -> Path:
    """Make a cache as huggingface_hub does; return the linked file."""
    (root / "blobs").mkdir(parents=True)
    write_jsonl(root / "blobs" / "9f3a6c01", 20)
    link = root / "snapshots" / "abc" / "data" / "train.jsonl"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../../blobs/9f3a6c01")
    return link


@pytest.mark.parametrize("up", [0, 1, 2, 4])
def test_the_name_of_a_link_tells_the_format(tmp_path: Path, up: int):
    path = link = cache(tmp_path / "hub")
    for _ in range(up):
        path = path.parent
    found = documents(config(tmp_path, path))
    assert len(found) == 20
    folder = path if up else path.parent
    assert found[0].name == f"{link.relative_to(folder).as_posix()}:1"


def test_linked_files_and_folders_are_read_once(tmp_path: Path):
    root, store = tmp_path / "root", tmp_path / "store"
    for folder in (root / "en", store / "fr" / "deep"):
        folder.mkdir(parents=True)
    write_jsonl(root / "en" / "a.jsonl", 11)
    write_jsonl(store / "fr" / "deep" / "b.jsonl", 13)
    (root / "fr").symlink_to(store / "fr")
    (root / "again").symlink_to(store / "fr" / "deep")
    (root / "en" / "self").symlink_to("..")
    (root / "en" / "up").symlink_to(tmp_path)
    (root / "en" / "copy.jsonl").symlink_to("a.jsonl")
    (store / "fr" / "back").symlink_to(root)
    found = documents(config(tmp_path, root))
    assert len(found) == 24
    assert {d.name.partition(":")[0] for d in found} == {"again/b.jsonl", "en/a.jsonl"}
    account = account_of(tmp_path, root)
    assert account.left_out[REPEATED].files == 5
    assert account.left_out[REPEATED].bytes == (root / "en" / "a.jsonl").stat().st_size
    assert account.left_out[REPEATED].examples[0].startswith("en/self (a link to ")


def dangling(path: Path) -> None:
    path.symlink_to("/no/such/file.jsonl")


def looping(path: Path) -> None:
    path.symlink_to(path.name)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def test_faults_of_several_kinds_get_no_advice_for_one_of_them(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    write_jsonl(root / "a.jsonl", 30)
    (root / "b.jsonl").write_bytes(b"PK\x03\x04" + bytes(50))
    with pytest.raises(DataError, match=r"\n  do: unpack it with: unzip"):
        documents(config(tmp_path, root))
    (root / "c.jsonl").symlink_to("/nowhere")
    with pytest.raises(DataError, match=r"\n  do: repair, restore or remove them, or leave such"):
        documents(config(tmp_path, root))


BREAKAGES: list[Callable[[Path], object]] = [
    dangling, looping, os.mkfifo, Path.touch, bound, lambda p: p.symlink_to("/dev/zero"),
]  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_cannot_be_read_is_refused_or_counted(tmp_path: Path, breakage, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(root)
    write_jsonl(root / "a.jsonl", 30)
    breakage(root / "gone.jsonl")
    with pytest.raises(
        DataError, match=r"(?s)1 of the files.*gone\.jsonl: .*\n  do: .*broken=skip"
    ):
        documents(config(tmp_path, root))
    account = account_of(tmp_path, root, broken="skip")
    assert (account.left_out[BROKEN].files, account.left_out[BROKEN].bytes) == (1, 0)
    assert account.documents == 30
    if breakage is not Path.touch:
        with pytest.raises(DataError, match=r"gone\.jsonl.*\n  do: "):
            documents(config(tmp_path, root / "gone.jsonl"))


@pytest.mark.parametrize("number", ["EACCES", "ESTALE", "ENOENT"])
def test_a_file_that_cannot_be_opened_is_refused_or_counted(
    tmp_path: Path, number: str, monkeypatch
):
    root = tmp_path / "root"
    root.mkdir()
    write_jsonl(root / "a.jsonl", 30)
    size = write_jsonl(root / "b.jsonl", 9).stat().st_size

    def fails(path: Path, key: str) -> file_formats.Detected:
        if path.name == "b.jsonl":
            raise OSError(getattr(errno, number), "gone away")
        return file_formats.detect(path, key)

    monkeypatch.setattr("frontier_llm.data.source_choice.detect", fails)
    with pytest.raises(DataError, match=r"b\.jsonl: gone away"):
        documents(config(tmp_path, root))
    account = account_of(tmp_path, root, broken="skip")
    assert (account.left_out[BROKEN].files, account.left_out[BROKEN].bytes) == (1, size)


def clone(root: Path) -> Path:
    """Make a clone of a data set, with what lies beside the data."""
    (root / "data").mkdir(parents=True)
    write_jsonl(root / "data" / "train.jsonl", 60)
    (root / "data" / "more.json.gz").write_bytes(
        gzip.compress(json.dumps({"text": "one"}).encode() + b"\n" + b'{"text": "two"}\n')
    )
    for name in ("README.md", "LICENSE", "CITATION.cff", "checksums.sha256", "sha256sums.txt"):
        (root / name).write_text("words about the data\n" * 300)
    (root / "dataset_infos.json").write_text('{"default": {"features": {"text": {"a": "b"}}}}')
    (root / "plot.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(9000))
    (root / "train.idx").write_bytes(b"MMIDIDX\0\0" + bytes(99))
    (root / ".gitattributes").write_text("*.jsonl filter=lfs\n")
    return root


def write_run(run: Path) -> None:
    """Write what a run has in its directory, as it trains."""
    run.mkdir(parents=True)
    (run / ".lock").touch()
    run_directory.write_config(run, "data: {path: .}\n")
    for name in ("run.log", "report.html", "metrics.jsonl"):
        (run / name).write_text("step 1\n" * 3000)
    write_weights(run, [[("a", torch.zeros(3))]], {})


def write_others(root: Path) -> None:
    """Write what a sweep, a failed start, an export and an archive leave in a folder."""
    write_run(root / "sweep" / "0" / "run")
    (root / "sweep" / "multirun.yaml").write_text("hydra: {}\n")
    trial = Trial([], "done", "", 1.0, 1.0, None, 1.0, 1.0)
    (root / "later" / "run").mkdir(parents=True)
    trial.write(root / "later")
    (root / "failed" / "failures").mkdir(parents=True)
    (root / "failed" / ".lock").touch()
    (root / "failed" / "failures" / "rank_0.json").write_text('{"kind": "user"}')
    write_run(root / "moved")
    (root / "moved" / "checkpoints" / "step_00000000").rename(root / "archived")
    (root / "exported").mkdir()
    theirs.write_model(root / "exported", {"model_type": "gpt2"}, [[("a", torch.zeros(3))]], 1)


@pytest.mark.parametrize("kind", ["text", "blend"])
def test_a_run_may_write_into_the_folder_that_it_reads(tmp_path: Path, kind: str):
    (tmp_path / "texts").mkdir()
    text = write_jsonl(tmp_path / "texts" / "a.jsonl", 120)
    corpora = [{"name": "a", "path": str(tmp_path)}, {"name": "b", "path": str(text)}]
    settings = config(
        tmp_path / "corpora", tmp_path if kind == "text" else None, kind=kind,
        corpora=corpora if kind == "blend" else (), vocabulary=262, validation_percent=40.0,
    )  # fmt: skip
    (tmp_path / "runs" / "new").mkdir(parents=True)
    (tmp_path / "runs" / "new" / ".lock").touch()  # the corpora are prepared before config.yaml
    first = prepare_all(settings, workers=1)
    write_run(tmp_path / "runs" / "first")
    assert prepare_all(settings, workers=1) == first
    write_others(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "texts" / "b.jsonl").write_text('{"text": "one more"}\n')
    account = Manifest.load(prepare_all(settings, workers=1)[0] / MANIFEST_FILE).account
    assert account is not None
    assert account.documents == 121
    assert account.left_out[OWN].files == 7 + (1 if kind == "text" else 4)
    assert account.left_out.keys() == {OWN, HIDDEN, REPEATED}


@pytest.mark.parametrize("what", ["sweep", "archived", "later", "exported"])
def test_a_folder_of_this_program_is_refused_as_text(tmp_path: Path, what: str):
    write_others(tmp_path)
    with pytest.raises(DataError, match=r"no text to train on\n  do: set data\.path to "):
        prepare(config(tmp_path / "c", tmp_path / what))
    with pytest.raises(DataError, match=r"all is left out, such as run \(a run directory\)"):
        prepare(config(tmp_path / "c", tmp_path / "sweep" / "0"))


def test_the_run_directory_is_not_the_folder_of_the_text(tmp_path: Path):
    values = tiny_values(
        "data=text", f"data.path={tmp_path}", f"run.dir={tmp_path}/../{tmp_path.name}"
    )
    with pytest.raises(ConfigError, match=r"another folder than data\.path") as caught:
        check_files(decode(values))
    assert caught.value.key == "run.dir"
    values["run"]["dir"] = str(tmp_path / "run")
    check_files(decode(values))


def test_files_beside_a_data_set_are_left_out_and_counted(tmp_path: Path):
    root = clone(tmp_path / "set")
    assert len(documents(config(tmp_path, root))) == 62
    account = account_of(tmp_path, root)
    assert {r: tally.files for r, tally in account.left_out.items()} == {BESIDE: 8, HIDDEN: 1}
    assert account.summary() == f"9 of 11 files left out (mostly {BESIDE})"


def test_text_and_records_in_comparable_amounts_are_refused(tmp_path: Path):
    root = clone(tmp_path / "set")
    (root / "book.txt").write_text("A paragraph.\n\n" * 500)
    with pytest.raises(
        DataError, match=r"(?s)mixes JSON lines .* with plain text.*data\.format=mixed.*=jsonl"
    ):
        documents(config(tmp_path, root))
    assert len(documents(config(tmp_path, root, format="mixed"))) == 63
    assert len(documents(config(tmp_path, root, broken="skip"))) == 62
    assert len(documents(config(tmp_path, root, format="jsonl"))) == 62
    names = {d.name for d in documents(config(tmp_path, root, format="text"))}
    assert {"book.txt", "README.md"} <= names
    assert not any("jsonl" in name for name in names)
    (root / "book.txt").write_text("A note.\n")
    account = account_of(tmp_path, root)
    assert account.left_out[OTHER_FORMAT].examples == ["book.txt"]


@pytest.mark.parametrize("texts", [1, 2, 80])
def test_text_beside_records_is_in_both_splits(tmp_path: Path, texts: int):
    root = tmp_path / "set"
    root.mkdir()
    write_jsonl(root / "records.jsonl", 200)
    for number in range(texts):
        (root / f"book{number}.txt").write_text(f"Paragraph {number}.\n\n" * 500)
    folder = prepare(config(tmp_path / "c", root, format="mixed", vocabulary=262), workers=1)
    files = [json.loads(line) for line in (folder / FILES_FILE).read_text().splitlines()]
    for kind in ("jsonl", "text"):
        train, validation = (
            sum(file[split] for file in files if file["format"] == kind)
            for split in ("train", "validation")
        )
        assert 0.02 < validation / (train + validation) < 0.2
        assert kind == "jsonl" or (train + validation == texts) == (texts == 80)


def test_json_without_the_key_of_the_text_is_refused_or_left_out(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 30)
    (tmp_path / "b.json").write_text(json.dumps({"body": "text " * 30}, indent=1))
    with pytest.raises(DataError, match=r"JSON without the key 'text'.*\n.*data\.broken=skip"):
        documents(config(tmp_path / "c", tmp_path))
    assert len(documents(config(tmp_path / "c", tmp_path, broken="skip"))) == 1


def test_the_problems_of_a_folder_are_refused_together(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 30)
    dangling(tmp_path / "gone.txt")
    (tmp_path / "page.jsonl").write_text("<!DOCTYPE html><html></html>")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(DataError, match=r"(?s)3 of the files.*gone\.txt.*empty\.csv.*page\.jsonl"):
        documents(config(tmp_path / "c", tmp_path))
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text('{"body": 1}\n{"text": "x"}\n[]\n')
    for name in ("gone.txt", "page.jsonl", "empty.csv"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"(?s)8 or more entries.*0\.jsonl:1.*0\.jsonl:3.*3 more"):
        documents(config(tmp_path / "c", tmp_path))


def test_damage_in_the_middle_of_files_is_counted_or_refused_together(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", 30)
    lines = (random.Random(n).randbytes(5000).hex() for n in range(300))  # more than is sniffed
    packed = gzip.compress("".join(f'{{"text": "{line}"}}\n' for line in lines).encode())
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:-99])
    (tmp_path / "c.json").write_text('[{"text": "one"}, {"text": "two"}, {"te')
    (tmp_path / "d.csv").write_text("id,body\n1,one\n")
    with pytest.raises(DataError, match=r"(?s)3 or more .*b\.jsonl.*c\.json.*d\.csv"):
        documents(config(tmp_path / "c", tmp_path, format="mixed"))
    account = account_of(tmp_path, tmp_path, broken="skip")
    assert account.broken_documents == 3
    assert "d.csv: no column 'text'" in " ".join(account.examples)
    (tmp_path / "b.jsonl.gz").unlink()
    (tmp_path / "c.json").unlink()
    with pytest.raises(DataError, match=r"d\.csv.*\n  do: set data\.text_key to the column"):
        documents(config(tmp_path / "c", tmp_path))
    (tmp_path / "d.csv").write_text("text,id,text\none,1,two\n")
    with pytest.raises(DataError, match=r"d\.csv.*2 columns .* 'text'\n  do: rename all but"):
        documents(config(tmp_path / "c", tmp_path))


def test_a_name_that_is_not_utf_8_is_printable(tmp_path: Path):
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_bytes(
        write_jsonl(tmp_path / "a\nb.jsonl", 30).read_bytes()
    )
    assert account_of(tmp_path, tmp_path).read.examples == ["a\\nb.jsonl", "\\udcff.jsonl"]


def test_a_key_of_records_is_refused_for_plain_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 30)
    with pytest.raises(ConfigError, match="is plain text") as caught:
        documents(config(tmp_path / "c", tmp_path, text_key="body"))
    assert caught.value.key == "data.text_key"


def test_a_folder_of_which_a_large_part_is_no_text_is_refused(tmp_path: Path):
    root = tmp_path / "text"
    root.mkdir()
    for number in range(30):
        (root / f"{number}.txt").write_text(f"text number {number}\n" * 9)
    (root / "model.bin").write_bytes(bytes(3000))
    with pytest.raises(DataError, match=r"\(\d+%\) are no text: model\.bin.*\n  do: .*broken=skip"):
        account_of(tmp_path, root)
    account = account_of(tmp_path, root, broken="skip")
    assert account.left_out[OTHER_FORMAT].bytes == 3000


def test_a_corpus_of_an_earlier_version_is_prepared_again(tmp_path: Path):
    text = write_jsonl(tmp_path / "text.jsonl")
    folder = prepare(config(tmp_path / "c", text))
    values = json.loads((folder / MANIFEST_FILE).read_text())
    del values["account"]
    (folder / MANIFEST_FILE).write_text(json.dumps(values | {"format": 2, "skipped_files": 0}))
    advice = r"format: Input should be 3\n  do: delete the folder .*; it is prepared again"
    with pytest.raises(DataError, match=advice):
        prepare(config(tmp_path / "c", text))
    shutil.rmtree(folder)
    assert prepare(config(tmp_path / "c", text)) == folder


def test_each_corpus_of_a_blend_has_its_account(tmp_path: Path):
    root = clone(tmp_path / "set")
    write_jsonl(tmp_path / "b.json", 50)
    corpora = [{"name": "a", "path": str(root)}, {"name": "b", "path": str(tmp_path / "b.json")}]
    blend = config(tmp_path / "c", None, kind="blend", corpora=corpora)
    opened = open_all(blend, prepare_all(blend, workers=1))
    assert opened.left_out == f"a: 9 of 11 files left out (mostly {BESIDE}), b: nothing left out"
    assert [corpus.manifest.account.documents for corpus in opened.corpora] == [62, 50]


def test_each_corpus_of_a_blend_may_have_its_format_and_key(tmp_path: Path):
    write_jsonl(tmp_path / "raw.jsonl", 50)
    rows = [f"{number},the river and the stone {number}" for number in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["id,body", *rows]))
    raw: dict[str, object] = {"name": "raw", "path": str(tmp_path / "raw.jsonl")}
    table: dict[str, object] = {"name": "rows", "path": str(tmp_path / "rows.csv")}

    def prepared(*corpora: dict[str, object]) -> tuple[Path, ...]:
        blend = config(tmp_path / "c", None, kind="blend", corpora=corpora)
        folders = prepare_all(blend, workers=1)
        assert all(folder for _, folder in find_prepared(blend))
        return folders

    folders = prepared({**raw, "format": "text"}, {**table, "text_key": "body"})
    manifests = [Manifest.load(folder / MANIFEST_FILE) for folder in folders]
    assert manifests[1].account is not None
    assert manifests[1].account.documents == 60
    lines = (tmp_path / "raw.jsonl").read_text()
    assert manifests[0].train.text_bytes + manifests[0].validation.text_bytes == len(lines.encode())
    with pytest.raises(DataError, match="text_key"):
        prepared(raw, table)
    other = prepared({**raw, "format": "jsonl"}, {**table, "text_key": "id"})
    assert not set(other) & set(folders)


@pytest.mark.parametrize("key", ["path", "format", "text_key"])
def test_a_key_that_an_entry_does_not_read_is_refused(tmp_path: Path, key: str):
    corpora = [{"name": "lib", "kind": "stdlib", key: "text"}]
    with pytest.raises(ConfigError, match=rf"\(lib\)\n.*{key}: text(.|\n)*leave {key} out"):
        check_sources(config(tmp_path, None, kind="blend", corpora=corpora))


def test_an_own_key_for_plain_text_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("plain words " * 300)
    entry = {"name": "a", "path": str(tmp_path / "a.txt"), "text_key": "body"}
    blend = config(tmp_path / "c", None, kind="blend", corpora=[entry])
    with pytest.raises(ConfigError, match=r"text_key(.|\n)*body(.|\n)*plain text"):
        prepare_all(blend, workers=1)


WRITERS: dict[str, Callable[[Path, random.Random, list[Path], list[Path]], object]] = {
    "records": lambda path, draw, files, folders: files.append(write_jsonl(path, 3)),
    "packed": lambda path, *_: path.with_suffix(".json.gz").write_bytes(
        gzip.compress(b'{"text": "a"}\n' * 9)
    ),
    "broken lines": lambda path, *_: path.write_text(
        '{"text": "a"}\n{"tex\n{"text": ""}\n{"text": "\\ud83d"}\n'
    ),
    "empty": lambda path, *_: path.touch(),
    "hidden": lambda path, *_: path.with_name(f".{path.name}").write_text("hidden"),
    "link to folder": lambda path, draw, files, folders: path.symlink_to(draw.choice(folders)),
    "link to file": lambda path, draw, files, folders: path.symlink_to(draw.choice(files)),
    "dangling": lambda path, *_: path.symlink_to("nowhere"),
    "loop": lambda path, *_: path.symlink_to(path.name),
    "readme": lambda path, *_: path.with_name("README.md").write_text("words"),
    "image": lambda path, *_: path.with_name("plot.png").write_bytes(b"\x89PNG" + bytes(50)),
    "text": lambda path, *_: path.with_suffix(".txt").write_text("a note"),
    "run": lambda path, *_: write_run(path.with_suffix("")),
}


def draw_tree(root: Path, draw: random.Random, kinds: list[str]) -> None:
    """Write a tree with one entry per kind, each in a random folder of it."""
    folders, files = [root], [write_jsonl(root / "base.jsonl", 40)]
    for number, kind in enumerate(kinds):
        folder = draw.choice(folders)
        if draw.random() < 0.5:
            folder = folder / f"{'.' * (draw.random() < 0.2)}d{number}"
            folder.mkdir()
            folders.append(folder)
        visible = [f for f in folders if "/." not in str(f)]
        WRITERS[kind](folder / f"f{number}.jsonl", draw, files, visible)


def walk(folder: Path, *, hidden: bool = False) -> tuple[int, int]:
    """Count the files and bytes below a folder; links to folders lead into the tree itself."""
    files = size = 0
    for path in folder.iterdir():
        hides = hidden or path.name[0] == "."
        if (path / "config.yaml").exists() and not hides:
            files += 1  # a run counts as one
            continue
        if path.is_dir() and not path.is_symlink():
            more = walk(path, hidden=hides)
            files, size = files + more[0], size + more[1]
            continue
        files += 1
        if path.is_file() and not (hides and path.is_symlink()):
            size += len(path.read_bytes())
    return files, size


def test_the_account_counts_marks_that_divide_files_and_marks_in_documents(tmp_path: Path):
    mark, root = "<|endoftext|>", tmp_path / "root"
    root.mkdir()
    (root / "stories.txt").write_text("".join(f"story {n}\n{mark}\n" for n in range(90)))
    (root / "notes.txt").write_text(f"A text about {mark} and <|end_of_text|>.\n")
    manifest = manifest_of(tmp_path, root)
    account = manifest.account
    assert account is not None
    assert (account.documents, account.marked_files, account.text.end_marks) == (91, 1, 2)
    assert account.warnings == []
    rows = dict(reversed(row) for row in account_rows(manifest, 40.0))
    assert rows["file divided at <|endoftext|>, which is left out"] == "1"
    assert rows["marks such as <|endoftext|> in documents, as ordinary text"] == "2"
    (root / "inline.txt").write_text(mark.join(f"story {n}" for n in range(40)))
    *_, warning = account_of(tmp_path, root).warnings
    assert "stands 41 times in documents as ordinary text" in warning


@pytest.mark.slow
@examples(20)
@given(seed=st.integers(0, 2**32), kinds=st.lists(st.sampled_from(list(WRITERS)), max_size=14))
def test_the_account_adds_up_to_the_bytes_of_a_folder(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kinds: list[str]
):
    base = tmp_path_factory.mktemp("tree")
    root = base / "root"
    root.mkdir()
    draw_tree(root, random.Random(seed), kinds)
    account = account_of(base, root, broken="skip")
    found = walk(root)
    assert (account.found.files, account.found.bytes) == found
    folder = next(path for path in (base / "corpora").iterdir() if path.is_dir())
    lines = [json.loads(line) for line in (folder / "files.jsonl").read_text().splitlines()]
    assert sum(line["bytes"] for line in lines) == account.read.bytes + sum(
        account.left_out[reason].bytes for reason in (EMPTY,) if reason in account.left_out
    )
    manifest = Manifest.load(folder / MANIFEST_FILE)
    kept = manifest.train.documents + manifest.validation.documents
    assert sum(line["train"] + line["validation"] for line in lines) == kept
    text_bytes = manifest.train.text_bytes + manifest.validation.text_bytes
    assert sum(line["text_bytes"] for line in lines) == text_bytes
    account.check(kept)
