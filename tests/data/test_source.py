import json
from pathlib import Path

import pytest

from frontier_llm.data import source_format
from frontier_llm.data.source import Document, Source
from frontier_llm.errors import DataError
from tests.data import conftest
from tests.data.conftest import config, source_of


def documents(path: Path, **changes: object) -> list[Document]:
    return conftest.documents(config(path.parent, path, **changes))


def digest(source: Source) -> str:
    return source.digest([source.scan(index) for index in range(len(source.files))])


def test_a_folder_has_one_document_per_visible_text_file_in_order(tmp_path: Path):
    root = tmp_path / "text"
    (root / "b" / ".git").mkdir(parents=True)
    (root / "b" / "one.md").write_text("one")
    (root / "b" / ".git" / "config").write_text("hidden")
    (root / "a.txt").write_bytes("\ufeffzwölf\r\n".encode())
    (root / "c.bin").write_bytes(b"\xff\xfe\x00")
    (root / "d.dat").write_bytes(b"abc\0def")
    (root / "e.txt").write_text("")
    (root / "gone").symlink_to(root / "nowhere")
    found = documents(root, broken="skip")
    assert [(d.name, d.text) for d in found] == [("a.txt", "zwölf\r\n"), ("b/one.md", "one")]


def test_jsonl_has_one_document_per_line(tmp_path: Path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"body": "a\\nb"}\n\n{"body": "c", "x": 1}\n{"body": ""}\n{"body": "\\ud800"}')
    found = documents(path, text_key="body")
    assert [(d.name, d.text) for d in found] == [
        ("text.jsonl:1", "a\nb"),
        ("text.jsonl:3", "c"),
        ("text.jsonl:5", "\ufffd"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "a"}', r"text\.jsonl:2: no text under the key 'text' \(this line has: body\)"),
        (b'{"text": 3}', r"text\.jsonl:2: the key 'text' holds a number, no text"),
        (b'{"text": null}', r"text\.jsonl:2: the key 'text' holds null, no text"),
        (b'{"text": ["a"]}', r"text\.jsonl:2: the key 'text' holds a list, no text"),
        (
            b'{"a": {"b": "x"}, "c": 2}',
            r"line has: a: \{b\}, c; a text in braces is not read: copy",
        ),
        (b'["text"]', r"text\.jsonl:2: no text under the key 'text' \(this line is a list\)"),
        (b'{"text": "a', r"text\.jsonl:2: this line is not JSON"),
        (b'{"text": "\xff"}', r"text\.jsonl:2: this line is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str):
    path = tmp_path / "text.jsonl"
    path.write_bytes(json.dumps({"text": "fine"}).encode() + b"\n" + line)
    with pytest.raises(DataError, match=message) as caught:
        documents(path)
    assert "do:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "separator", "wanted"), [("a.csv", ";", "commas"), ("a.csv", "\t", "commas"),
                                      ("a.tsv", ",", "tabs")]
)  # fmt: skip
def test_columns_with_another_separator_are_named(
    name: str, separator: str, wanted: str, tmp_path: Path
):
    rows = [separator.join(row) for row in (("id", "text"), ("1", "one"), ("2", "two"))]
    (tmp_path / name).write_text("\n".join(rows))
    with pytest.raises(DataError, match=f"add a header, or write with {wanted}$") as caught:
        documents(tmp_path / name)
    assert f"it has: {rows[0]})" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"Paragraph {i}\nof two lines.\n\n" for i in range(50_000)),
        "one line after another, no blank one\r\n" * 40_000,
        "a single line " * 100_000,
        "".join(f"Short paragraph {i}.\n\n" for i in range(200)),
    ],
    ids=["paragraphs", "lines", "one_line", "short"],
)
def test_one_text_file_is_split_into_documents_without_loss(tmp_path: Path, text: str):
    path = tmp_path / "book.txt"
    path.write_text(text, newline="")
    found = documents(path)
    assert "".join(d.text for d in found) == text
    assert len({d.name for d in found}) == len(found)
    sides = [d.is_validation(10) for d in found]
    assert any(sides)
    assert not all(sides)


def test_paragraphs_stay_whole(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Paragraph {i}\nof two lines.\n\n" for i in range(5000)))
    assert all(d.text.startswith("Paragraph") for d in documents(path))


def test_the_standard_library_is_found_without_its_tests():
    source = source_of(config(Path("corpora"), None, kind="stdlib"))
    names = [file.name for file in source.files]
    assert {"json/decoder.py", "os.py", "asyncio/tasks.py"} <= set(names)
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert all(name.endswith(".py") for name in names)
    banned = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert not [name for name in names if banned & set(Path(name).parts)]
    assert source.size > 5_000_000


def test_the_split_of_a_document_depends_on_its_name_alone(tmp_path: Path):
    names = [f"{i}.txt" for i in range(2000)]
    share = sum(Document(name, "x").is_validation(5) for name in names) / 2000
    assert 0.03 < share < 0.07
    again = [Document(name, "other").is_validation(5) for name in names]
    assert again == [Document(name, "x").is_validation(5) for name in names]


def test_fingerprint_and_digest_see_a_change(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    before = source_of(config(tmp_path, path))
    path.write_text("abcd")
    after = source_of(config(tmp_path, path))
    assert before.fingerprint() != after.fingerprint()
    other = tmp_path / "other" / "a.txt"
    other.parent.mkdir()
    other.write_text("abcd")
    assert digest(source_of(config(tmp_path, other))) == digest(after)
    path.write_text("abce")
    changed, kept = source_of(config(tmp_path, path)), source_of(config(tmp_path, other))
    assert digest(changed) != digest(kept)


def test_a_missing_path_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"there is no .*nothing\n  do: set data.path"):
        source_of(config(tmp_path, tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"set data\.path"):
        source_of(config(tmp_path, None))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_empty_source_is_refused(tmp_path: Path, kind: str):
    path = tmp_path / "source"
    path.mkdir() if kind == "folder" else path.write_text("")
    with pytest.raises(DataError, match=r"there is no text in .*source\n  do: "):
        source_of(config(tmp_path, path))


@pytest.mark.parametrize("content", [b"na\xefve", b"GIF89a\0\0"])
def test_one_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"file.txt: not UTF-8 text: .* at byte \d+\n  do: "):
        documents(path)


def test_a_file_that_vanished_is_named(tmp_path: Path):
    root = tmp_path / "text"
    root.mkdir()
    (root / "a.txt").write_text("abc")
    source = source_of(config(tmp_path, root))
    (root / "a.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.txt: No such file"):
        list(source.entries(0, source_format.Cut(0, 3, 0, 3)))
    with pytest.raises(DataError, match=r"cannot read .*a.txt: No such file"):
        source.scan(0)
