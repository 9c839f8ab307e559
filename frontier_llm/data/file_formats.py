"""Find the format of a source file: from its content, checked against its name.

A file whose name and content disagree has a problem, which says both. `data.format` overrules the
name and the content.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from frontier_llm.data.compression import SUFFIXES, compression_of, open_plain
from frontier_llm.data.csv_files import Csv, Tsv
from frontier_llm.data.json_lines import JsonLines
from frontier_llm.data.json_values import JsonValues
from frontier_llm.data.parquet_files import Parquet
from frontier_llm.data.source_format import (
    BOM,
    Cut,
    Entry,
    Format,
    Scan,
    Undivided,
    sha256_of,
)
from frontier_llm.data.text_files import (
    LONG_FILE_BYTES,
    CompressedText,
    CompressedWholeText,
    LongText,
    WholeText,
)
from frontier_llm.errors import DataError
from frontier_llm.units import KIB

HEAD_BYTES = 256 * KIB
"""Number of decompressed bytes from which the format of a file is found."""
_CHECKED_LINES = 50
"""Number of lines of a file that are parsed to find out whether it holds JSON lines."""


@dataclass(frozen=True)
class FileFormat:
    """A format of source files."""

    title: str
    suffixes: tuple[str, ...]
    reader: type[Format] | None = None
    """Reader of the format; None: text, which has several."""


FORMATS = {
    "text": FileFormat("plain text", (".txt", ".text", ".md", ".rst")),
    "jsonl": FileFormat("JSON lines", (".jsonl", ".ndjson", ".jsonlines"), JsonLines),
    "json": FileFormat("one JSON array or object", (".json",), JsonValues),
    "parquet": FileFormat("Parquet", (".parquet", ".pq"), Parquet),
    "csv": FileFormat("CSV", (".csv",), Csv),
    "tsv": FileFormat("TSV", (".tsv", ".tab"), Tsv),
}
"""Formats by their names, the values of data.format. A suffix of compression may follow the others.
"""
_FOREIGN = (
    (0, b"ARROW1", "an Arrow file"), (0, b"\xff\xff\xff\xff", "an Arrow stream"),
    (257, b"ustar", "a tar archive"), (0, b"PK\x03\x04", "a zip archive"),
    (0, b"7z\xbc\xaf", "a 7z archive"), (0, b"Rar!", "a rar archive"),
    (0, b"\x80\x02", "a Python pickle"), (0, b"\x80\x03", "a Python pickle"),
    (0, b"\x80\x04", "a Python pickle"), (0, b"\x80\x05", "a Python pickle"),
    (0, b"MMIDIDX", "an index of Megatron"), (0, b"TNTIDX", "an index of fairseq"),
    (0, b"\x93NUMPY", "a NumPy array"), (0, b"\x89HDF", "an HDF5 file"),
    (0, b"SQLite format 3\0", "an SQLite database"), (0, b"Obj\x01", "an Avro file"),
    (0, b"ORC", "an ORC file"), (0, b"\x7fELF", "a program"), (0, b"%PDF", "a PDF file"),
    (0, b"\x89PNG", "a PNG image"), (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS, not the data"),
    (0, b"/annex/objects/", "a pointer of git-annex, not the data"),
    (0, b"../.git/annex/objects/", "a pointer of git-annex, not the data"),
)  # fmt: skip
"""(position, bytes at this position, title) of formats that cannot be read."""
_PAGE = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!doctype\s+html|<html|<head|<error>)", re.I)
_NOT_PAGES = ("", ".txt")
"""Suffixes of files of text that are not expected to hold HTML."""
_NO_JSON = "text that begins like JSON"
_OBJECT = re.compile(rb'\s*(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')
_ADVICE = {
    "a pointer of Git LFS, not the data": "fetch the data with: git lfs pull",
    "a pointer of git-annex, not the data": "fetch the data with: git annex get",
    "a tar archive": "unpack it with: tar -xf",
    "a zip archive": "unpack it with: unzip",
    "UTF-16 text": "convert it with: iconv -f UTF-16 -t UTF-8",
    "an HTML page": "download the data again, because servers answer with such a page after errors",
}
"""What to do about some formats that cannot be read."""


@dataclass(frozen=True)
class Content:
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
    """What the content is, if it cannot be read."""
    problem: str | None = None
    """Why the content and the name disagree; None if they agree."""
    advice: str = "leave it out"
    """What to do about the problem."""
    content: str | None = None
    """Key of FORMATS that the content alone suggests."""
    has_no_text: bool = False
    """Whether this is JSON without the key of the text, which counts as text in a folder of text.
    """

    @property
    def is_structured(self) -> bool:
        """Whether the file holds records, each with its text under a key."""
        return self.format not in (None, "text")

    @property
    def is_binary(self) -> bool:
        """Whether the file cannot be read, and its content is no text."""
        return self.format is None and "pointer" not in self.title and "HTML" not in self.title


def claim_of(name: str) -> tuple[str | None, str]:
    """Return the format and the compression that the suffixes of a name stand for."""
    path = Path(name.lower())
    compression = SUFFIXES.get(path.suffix, "")
    suffix = path.with_suffix("").suffix if compression else path.suffix
    claim = next((key for key, known in FORMATS.items() if suffix in known.suffixes), None)
    return claim, compression


def detect(path: Path, text_key: str) -> Detected:
    """Find the format of a file.

    Args:
        path: path of the file.
        text_key: key or column that holds the text.

    Raises:
        OSError: the file cannot be read.
    """
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
    return replace(_check(path.name, compression, content), content=content.format)


def _check(name: str, compression: str, content: Content) -> Detected:
    """Compare the content of a file with its name."""
    claim, claimed_compression = claim_of(name)
    packed = f" compressed with {compression}" if compression else ""
    title = f"{content.title}{packed}"
    is_page = content.title == "an HTML page" and not compression
    if is_page and Path(name).suffix.lower() not in _NOT_PAGES and claim in (None, "text"):
        return Detected("text")
    if claim is None and not (claimed_compression or content.is_data or is_page):
        if content.format is None or compression:
            return Detected(None, compression, title)
        return Detected("text", compression)
    found = _agreed(claim, content)
    is_packed_parquet = found == "parquet" and compression  # Parquet compresses its columns itself
    if found and compression == claimed_compression and not is_packed_parquet:
        has_no_text = claim == "json" and found == "text"
        return Detected(found, compression, title, has_no_text=has_no_text)
    says = FORMATS[claim].title if claim else "no format"
    says += f" compressed with {claimed_compression}" if claimed_compression else ""
    problem = f"its name says {says}, but its content is {title}"
    advice = "decompress it" if is_packed_parquet else _advice(claim, content)
    return Detected(None, compression, title, problem, advice)


def _agreed(claim: str | None, content: Content) -> str | None:
    """Return the format to read a file in; None if the name and the content disagree."""
    if content.title == "nothing":
        return claim or "text"
    if claim == "json" and content.format == "json":
        return "json" if content.is_data else "text"
    if claim == "json" and content.format == "jsonl":
        return "jsonl"
    if claim == "json" and content.title == _NO_JSON:  # such as JSON with comments
        return "text"
    if claim in (None, "text") and content.format is not None and not content.is_data:
        return "text"
    if claim in ("csv", "tsv") and content.format in ("csv", "tsv", "text"):
        return claim
    return claim if claim == content.format else None


def _advice(claim: str | None, content: Content) -> str:
    if content.format is None:
        return _ADVICE.get(content.title, "convert it to JSON lines, or leave it out")
    known = FORMATS[content.format]
    advice = f"set data.format={content.format} to read {known.title}"
    if content.format != "text":
        advice += f", or rename it to *{known.suffixes[0]}"
    if content.format != "text" and claim in (None, "text"):
        advice += "; data.format=text trains on the raw text"
    return advice


def sniff(head: bytes, text_key: str) -> Content:
    """Return what a file holds that begins with `head`, which is decompressed."""
    for position, magic, title in _FOREIGN:
        if head.startswith(magic, position):
            return Content(None, title)
    if compression := compression_of(head):
        return Content(None, f"{compression} data")
    if head.startswith(b"PAR1"):
        return Content("parquet", FORMATS["parquet"].title, is_data=True)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and len(head) % 2 == 0:
        return Content(None, "UTF-16 text")
    if _PAGE.match(head.removeprefix(BOM)):
        return Content(None, "an HTML page")
    if not head.replace(BOM, b"").strip():
        return Content("text", "nothing")
    return _sniff_records(head, text_key) or Content("text", "other text")


def _sniff_records(head: bytes, text_key: str) -> Content | None:
    """Return what records a text holds, if it holds any."""
    has_key = re.search(re.escape(json.dumps(text_key).encode()) + rb"\s*:", head) is not None
    parsed = _parsed_lines(head)
    objects = sum(isinstance(record, dict) and bool(record) for record in parsed)
    if 2 * objects >= len(parsed) and objects:
        return Content("jsonl", FORMATS["jsonl"].title, objects > 1 or has_key)
    start = _OBJECT.match(head.replace(BOM, b""))
    if start and len(parsed) == 0 and not start[1]:  # a single line that is longer than the head
        return Content("jsonl", FORMATS["jsonl"].title, has_key)
    if start or (parsed and isinstance(parsed[0], list)):
        title = FORMATS["json"].title
        return Content("json", title if has_key else f"JSON without the key '{text_key}'", has_key)
    if head.lstrip()[:1] in (b"[", b"{"):
        return Content("text", _NO_JSON)
    first = re.split(rb"[\r\n]", head.removeprefix(BOM), maxsplit=1)[0].decode(errors="replace")
    for key, delimiter in (("csv", ","), ("tsv", "\t")):
        fields = [name.strip('"') for name in first.split(delimiter)]
        if (
            len(fields) > 1
            and text_key in fields
            and all(re.fullmatch(r"[\w.-]*", f) for f in fields)
        ):
            return Content(key, FORMATS[key].title, is_data=True)
    return None


def _parsed_lines(head: bytes) -> list[object]:
    """Return the values of the first lines that are not blank; None for a line that is not JSON."""
    lines = re.split(rb"[\r\n]+", head)
    if len(head) == HEAD_BYTES:
        lines.pop()  # the end of the last line may be missing
    texts = [line.removeprefix(BOM).decode(errors="replace") for line in lines if line.strip()]
    return [_parsed(text) for text in texts[:_CHECKED_LINES]]


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Unreadable(Undivided):
    """A file in a format that cannot be read: it is digested, and holds no text."""

    def scan(self) -> Scan:
        """Digest the file."""
        return Scan(sha256_of(self.path), ())

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield nothing."""
        yield from ()


def reader_of(path: Path, size: int, detected: Detected, key: str, *, divided: bool) -> Format:
    """Return the reader of a file.

    Args:
        path: path of the file.
        size: size of the file in bytes.
        detected: format of the file.
        key: key or column that holds the text.
        divided: whether a short text becomes several documents, as a long one does.
    """
    reader: type[Format]
    if detected.format is None:
        reader = Unreadable
    elif known := FORMATS[detected.format].reader:
        reader = known
    elif detected.compression:
        reader = CompressedText if divided or size > LONG_FILE_BYTES else CompressedWholeText
    else:
        reader = LongText if divided or size > LONG_FILE_BYTES else WholeText
    return reader(path, size, detected.compression, key)
