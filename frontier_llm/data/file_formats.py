"""Find the format of a source file: from its content, checked against its name.

A file whose name and content disagree has a problem, which says both. `data.format` overrules the
name and the content.
"""

import io
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from frontier_llm.data.file_readers import (
    LONG_FILE_BYTES,
    CompressedWholeText,
    Csv,
    JsonLines,
    JsonValues,
    LongText,
    MarkedText,
    Parquet,
    Tsv,
    WholeText,
    elements,
    keys_in,
)
from frontier_llm.data.source_format import (
    BOM,
    END_MARKS,
    SUFFIXES,
    Format,
    Unreadable,
    compression_of,
    open_plain,
)
from frontier_llm.errors import DataError
from frontier_llm.units import KIB

HEAD_BYTES = 256 * KIB
"""Number of decompressed bytes from which the format of a file is found."""
_CHECKED_LINES = 50
"""Number of lines of a file that are parsed to find out whether it holds JSON lines."""


class FileFormat(NamedTuple):
    """A format of source files."""

    title: str
    suffixes: tuple[str, ...]
    reader: type[Format]


FORMATS = {
    "text": FileFormat("plain text", (".txt", ".text", ".md", ".rst"), WholeText),
    "jsonl": FileFormat("JSON lines", (".jsonl", ".ndjson", ".jsonlines"), JsonLines),
    "json": FileFormat("one JSON array or object", (".json",), JsonValues),
    "parquet": FileFormat("Parquet", (".parquet", ".pq"), Parquet),
    "csv": FileFormat("CSV", (".csv",), Csv),
    "tsv": FileFormat("TSV", (".tsv", ".tab"), Tsv),
}
"""Formats by their names, the values of data.format."""
_PAGE, _UTF_16 = "an HTML page", "UTF-16 text"
_LFS, _ANNEX = "a pointer of Git LFS, not the data", "a pointer of git-annex, not the data"
_FOREIGN = {
    b"ARROW1": "an Arrow file", b"\xff\xff\xff\xff": "an Arrow stream",
    b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf": "a 7z archive",
    b"\x80\x02": "a Python pickle", b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle", b"\x80\x05": "a Python pickle", b"%PDF": "a PDF file",
    b"MMIDIDX": "an index of Megatron", b"\x93NUMPY": "a NumPy array", b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\0": "an SQLite database", b"Obj\x01": "an Avro file", b"\x7fELF": "a program",
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"/annex/objects/": _ANNEX,
    b"../.git/annex/objects/": _ANNEX, b"version https://git-lfs.github.com/spec/": _LFS,
}  # fmt: skip
"""First bytes of formats that cannot be read."""
_ADVICE = {
    _LFS: "fetch the data with: git lfs pull",
    _ANNEX: "fetch the data with: git annex get",
    "a tar archive": "unpack it with: tar -xf",
    "a zip archive": "unpack it with: unzip",
    _UTF_16: "convert it with: iconv -f UTF-16 -t UTF-8",
    _PAGE: "download the data again, because servers answer with such a page after errors",
    **dict.fromkeys(
        (f"{name} data" for name in SUFFIXES.values()),
        "decompress it once and keep its name, because it is compressed twice",
    ),
}
_NOT_PAGES = ("", ".txt")
"""Suffixes of files of text that are not expected to hold HTML."""
_PAGE_START = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!doctype\s+html|<html|<head|<error>)", re.I)
_RECORDS_START = re.compile(rb'\s*(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')
_NO_JSON = "text that begins like JSON"


class Content(NamedTuple):
    """What the first bytes of a file hold."""

    format: str | None
    """Key of FORMATS; None: a format that cannot be read."""
    title: str
    is_data: bool = False
    """Whether these are certainly records with a text, whatever the name says."""


@dataclass(frozen=True)
class Detected:
    """Format of a source file."""

    format: str | None = "text"
    """Key of FORMATS; None: it cannot be read."""
    compression: str = ""
    """What the file is compressed with: a value of SUFFIXES, or ""."""
    title: str = ""
    problem: str | None = None
    """Why the content and the name disagree; None if they agree."""
    advice: str = "leave it out"
    content: str | None = None
    """Key of FORMATS that the content alone suggests."""
    has_no_text: bool = False
    """Whether this is JSON without the key of the text, which is text in a folder of text."""

    is_marked: bool = False
    """Whether this is text in which END_MARKS divide documents."""

    @property
    def is_structured(self) -> bool:
        """Whether the file holds records, each with its text under a key."""
        return self.format not in (None, "text")

    @property
    def is_binary(self) -> bool:
        """Whether the file cannot be read, and its content is no text."""
        return self.format is None and self.title not in (_LFS, _ANNEX, _PAGE)


def claim_of(name: str) -> tuple[str | None, str]:
    """Return the format and the compression that the suffixes of a name stand for."""
    path = Path(name.lower())
    compression = SUFFIXES.get(path.suffix, "")
    suffix = path.with_suffix("").suffix if compression else path.suffix
    claim = next((key for key, known in FORMATS.items() if suffix in known.suffixes), None)
    return claim, compression


def detect(path: Path, text_key: str) -> Detected:
    """Find the format of a file; its text is under `text_key`, a key or column."""
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    compression = compression_of(head)
    if compression:
        try:
            with open_plain(path, compression) as plain:
                head = plain.read(HEAD_BYTES)
        except DataError as error:
            problem, _, advice = str(error).partition("\n  do: ")
            problem = problem.removeprefix(f"{path}: ").replace(f"{path} is", "it is")
            return Detected(None, compression, "damaged", problem, advice)
    content = sniff(head, text_key)
    found = replace(_check(path.name, compression, content), content=content.format)
    return replace(found, is_marked=found.format == "text" and _has_marks(head))


def _check(name: str, compression: str, content: Content) -> Detected:
    claim, claimed_compression = claim_of(name)
    title = content.title + (f" compressed with {compression}" if compression else "")
    is_page = content.title == _PAGE and not compression and claim in (None, "text")
    if is_page and Path(name).suffix.lower() not in _NOT_PAGES:
        return Detected()
    if claim is None and not (claimed_compression or content.is_data or is_page):
        is_text = content.format is not None and not compression
        return Detected("text" if is_text else None, compression, title)
    found = _agreed(claim, content)
    is_packed = bool(compression) and found == "parquet"  # Parquet compresses its columns itself
    if found and compression == claimed_compression and not is_packed:
        has_no_text = claim == "json" and found == "text"
        return Detected(found, compression, title, has_no_text=has_no_text)
    named = [FORMATS[claim].title] if claim else []
    named += [f"compressed with {claimed_compression}"] if claimed_compression else []
    says = "says " + " ".join(named) if named else "has no known suffix"
    problem = f"its name {says}, but its content is {title}"
    if content.format is None or is_packed:
        default = "decompress it" if is_packed else "convert it to JSON lines"
        return Detected(None, compression, title, problem, _ADVICE.get(content.title, default))
    known = FORMATS[content.format]
    advice = f"set data.format={content.format} to read {known.title}"
    if content.format != "text":
        packed = next((end for end, name in SUFFIXES.items() if name == compression), "")
        advice += f", or rename it to *{known.suffixes[0]}{packed}"
        advice += "; data.format=text trains on the raw text" if claim in (None, "text") else ""
    return Detected(None, compression, title, problem, advice)


def _agreed(claim: str | None, content: Content) -> str | None:
    """Return the format to read a file in; None if the name and the content disagree."""
    match claim, content.format:
        case _ if content.title == "nothing":
            return claim or "text"
        case "json", "json":
            return "json" if content.is_data else "text"
        case "json", "jsonl":
            return "jsonl"
        case "json", "text" if content.title == _NO_JSON:  # such as JSON with comments
            return "text"
        case None | "text", str() if not content.is_data:
            return "text"
        case "csv" | "tsv", "csv" | "tsv" | "text":
            return claim
    return claim if claim == content.format else None


def sniff(head: bytes, text_key: str) -> Content:
    """Return what a file holds that begins with `head`, which is decompressed."""
    for magic, title in _FOREIGN.items():
        if head.startswith(magic):
            return Content(None, title)
    if head.startswith(b"ustar", 257):
        return Content(None, "a tar archive")
    if compression := compression_of(head):
        return Content(None, f"{compression} data")
    if head.startswith(b"PAR1"):
        return Content("parquet", "Parquet", is_data=True)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and len(head) % 2 == 0:
        return Content(None, _UTF_16)
    head = head.replace(BOM, b"")
    if _PAGE_START.match(head):
        return Content(None, _PAGE)
    if not head.strip():
        return Content("text", "nothing")
    return _sniff_records(head, text_key) or Content("text", "other text")


def _sniff_records(head: bytes, text_key: str) -> Content | None:
    """Return what records a text holds, if it holds any."""
    has_key = re.search(re.escape(json.dumps(text_key).encode()) + rb"\s*:", head) is not None
    lines = [line for line in re.split(rb"[\r\n]+", head) if line.strip()][:_CHECKED_LINES]
    parsed = [_parsed(line) for line in lines]
    objects = sum(isinstance(record, dict) and bool(record) for record in parsed)
    start = _RECORDS_START.match(head)
    # the last line of the head is often incomplete, so a single line need not be JSON
    if 2 * objects >= max(len(parsed), 1) or (len(lines) == 1 and start and not start[1]):
        return Content("jsonl", FORMATS["jsonl"].title, objects > 1 or has_key)
    if start or (parsed and isinstance(parsed[0], list)):
        if has_key:
            return Content("json", FORMATS["json"].title, has_key)
        has = ""
        with suppress(ValueError, RecursionError, StopIteration):  # it may be longer than the head
            first = next(elements(io.TextIOWrapper(io.BytesIO(head), "utf-8", "replace")))
            has = f" (its first element {keys_in(first)})"
        return Content("json", f"JSON without the key '{text_key}'{has}")
    if head.lstrip()[:1] in (b"[", b"{"):
        return Content("text", _NO_JSON)
    first = lines[0].decode(errors="replace")
    for key, delimiter in (("csv", ","), ("tsv", "\t")):
        names = [name.strip('"') for name in first.split(delimiter)]
        if len(names) > 1 and text_key in names and all(re.fullmatch(r"[\w.-]*", n) for n in names):
            return Content(key, FORMATS[key].title, is_data=True)
    return None


def _has_marks(head: bytes) -> bool:
    """Whether END_MARKS divide a text into documents: several lines end with one.

    A text about such marks names them within its lines.
    """
    lines = head.replace(BOM, b"").splitlines()
    return sum(line.rstrip().decode(errors="replace").endswith(END_MARKS) for line in lines) > 1


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def reader_of(path: Path, size: int, detected: Detected, key: str, *, divided: bool) -> Format:
    """Return the reader of a file.

    With `divided` a short text becomes several documents, as a long one does.
    """
    reader = FORMATS[detected.format].reader if detected.format else Unreadable
    if detected.is_marked:
        reader = MarkedText
    elif reader is WholeText and (divided or (size > LONG_FILE_BYTES and not detected.compression)):
        reader = LongText
    elif reader is WholeText and detected.compression:
        reader = CompressedWholeText
    return reader(path, size, detected.compression, key)
