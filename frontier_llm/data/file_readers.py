"""Read files of text, and files of records with their texts under a key or in a column.

A short file of text is one document, and a long one is divided into sections. Records are JSON, CSV
and Parquet. The classes implement the interface of data/source_format.py: `scan` finds the *cuts*,
the ranges of a file that workers can read independently, and `entries` yields the texts of one cut.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from frontier_llm.data import source_format
from frontier_llm.data.source_format import (
    BOM,
    CUT_BYTES,
    END_MARKS,
    LONGEST_DOCUMENT_BYTES,
    READ_BYTES,
    Cut,
    Entry,
    Format,
    NoTextError,
    Scan,
    Undivided,
    decode,
    kind_of,
    lines_of,
    open_plain,
    sha256_of,
    text_entry,
    too_long,
)
from frontier_llm.errors import DataError, install_command
from frontier_llm.units import KIB, MIB

LONG_FILE_BYTES = 4 * MIB
"""A plain text file of more bytes is divided into several documents."""
SECTION_BYTES = 64 * KIB
"""A section of a large file has about this size."""
SMALL_FILE_SECTIONS = 128
"""Number of sections of a file that is too small for this number of sections of SECTION_BYTES."""
_CHARACTER_BYTES = 4
"""Largest number of bytes of a character in UTF-8."""
_SHOWN_CHARACTERS = 200
_END_MARK = "|".join(map(re.escape, END_MARKS))
_MARKED_PART = re.compile(f".*?(?:{_END_MARK})|.+".encode(), re.DOTALL)
_BETWEEN = re.compile(r"[\s,]*")
"""What is between the elements of an array."""
BATCH_ROWS = 256


class WholeText(Format):
    """A file that is one document."""

    mark = ""

    def scan(self) -> Scan:
        """Read the file and check that it is text."""
        content = self.path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if not content:
            return Scan(digest, ())
        try:
            decode(content)
        except NoTextError as error:
            return Scan(digest, (), f"not UTF-8 text: {error}")
        return Scan(digest, (Cut(0, len(content), 0, len(content)),))

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the text of the file."""
        yield _entry(cut.number, self.path.read_bytes(), cut.start)


class LongText(Undivided):
    """A file that is divided into sections, each of which is a document.

    A section ends at the first blank line after the intended size. If there is none within four
    times this size, the section ends at the end of any line. A compressed file has a single cut.
    """

    mark = "#"
    first = 0

    def scan(self) -> Scan:
        """Digest the file and divide it into cuts between sections.

        The file counts as holding no text if its first section is not text.
        """
        first = next(self.entries(Cut(0, 1, 0, 1)), None)
        problem = "it is empty" if first is None else first.problem
        if self.compression:
            scan = super().scan()
            return scan if problem is None else Scan(scan.sha256, (), problem)
        hasher, cuts = hashlib.sha256(), []
        cut_start = position = cut_section = 0
        with self.path.open("rb") as stream:
            for number, section in enumerate(self._sections(stream)):
                hasher.update(section)
                position += len(section)
                if position - cut_start >= CUT_BYTES:
                    cuts.append(Cut(cut_start, position, cut_section, position - cut_start))
                    cut_start, cut_section = position, number + 1
        if position > cut_start:
            cuts.append(Cut(cut_start, position, cut_section, position - cut_start))
        return Scan(hasher.hexdigest(), () if problem else tuple(cuts), problem or "")

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the sections of a cut."""
        with open_plain(self.path, self.compression) as stream:
            position = 0 if self.compression else stream.seek(cut.start)
            for number, section in enumerate(self._sections(stream), cut.number):
                yield _entry(number, section, position)
                position += len(section)
                if position >= cut.end and not self.compression:
                    break

    def _section_bytes(self) -> int:
        return min(SECTION_BYTES, max(self._plain_bytes // SMALL_FILE_SECTIONS, 1))

    @cached_property
    def _plain_bytes(self) -> int:
        """Size of the decompressed text, at most that from which on sections have full size."""
        if not self.compression:
            return self.size
        with open_plain(self.path, self.compression) as stream:
            return len(stream.read(SECTION_BYTES * SMALL_FILE_SECTIONS))

    def _sections(self, stream: io.BufferedReader) -> Iterator[bytes]:
        target = self._section_bytes()
        lines: list[bytes] = []
        size = 0
        while line := _read_line(stream):
            lines.append(line)
            size += len(line)
            if size >= 4 * target or (size >= target and not line.strip()):
                yield b"".join(lines)
                lines, size = [], 0
        if lines:
            yield b"".join(lines)


class MarkedText(LongText):
    """A file whose documents end at END_MARKS, which are no part of them.

    A document of more than LONGEST_DOCUMENT_BYTES is divided.
    """

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield the documents of a cut."""
        for entry in super().entries(cut):
            text = re.sub(_END_MARK, "", entry.text).lstrip("\r\n").rstrip()
            yield Entry(entry.place, text, entry.problem)

    def _sections(self, stream: io.BufferedReader) -> Iterator[bytes]:
        marks = tuple(mark.encode() for mark in END_MARKS)
        ended, parts, size = b"", list[bytes](), 0  # `ended` waits: blanks may end the file
        while line := stream.readline(LONGEST_DOCUMENT_BYTES):
            for part in _MARKED_PART.findall(line):
                parts.append(part)
                size += len(part)
                if part.endswith(marks) or size > LONGEST_DOCUMENT_BYTES:
                    if ended:
                        yield ended
                    ended, parts, size = b"".join(parts), [], 0
        rest = b"".join(parts)
        if ended and rest.strip():
            yield ended
            ended = b""
        if ended or rest:
            yield ended + rest


class CompressedWholeText(LongText):
    """A compressed file of text that is one document, unless it is long."""

    def _section_bytes(self) -> int:
        is_long = self._plain_bytes > LONG_FILE_BYTES
        return super()._section_bytes() if is_long else LONG_FILE_BYTES


def _entry(place: int, content: bytes, start: int) -> Entry:
    """Decode the bytes of a document, which begin at byte `start` of the file."""
    try:
        return Entry(place, decode(content, start))
    except NoTextError as error:
        return Entry(place, "", f"not UTF-8 text: {error}")


def _read_line(stream: io.BufferedReader) -> bytes:
    """Read a line, or about SECTION_BYTES of a longer line without splitting a character."""
    line = stream.readline(SECTION_BYTES)
    for _ in range(_CHARACTER_BYTES - 1):
        following = b"" if line.endswith(b"\n") else stream.peek(1)[:1]
        if not following or following[0] & 0xC0 != 0x80:  # the next byte begins a character
            break
        line += stream.read(1)
    return line


class JsonLines(Undivided):
    """A JSONL file: each line that is not blank is a document.

    A compressed file has a single cut, because it can only be read from its start.
    """

    def scan(self) -> Scan:
        """Digest the file and divide it into cuts between lines. The lines are not parsed."""
        if self.compression:
            return super().scan()
        hasher, cuts = hashlib.sha256(), []
        cut_start = position = 0
        cut_line = line = 1
        with self.path.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                hasher.update(block)
                position += len(block)
                line += block.count(b"\n")
                if position - cut_start >= CUT_BYTES and (newline := block.rfind(b"\n")) >= 0:
                    cut_end = position - len(block) + newline + 1
                    cuts.append(Cut(cut_start, cut_end, cut_line, cut_end - cut_start))
                    cut_start, cut_line = cut_end, line
        if position > cut_start:
            cuts.append(Cut(cut_start, position, cut_line, position - cut_start))
        return Scan(hasher.hexdigest(), tuple(cuts))

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per line of a cut that is not blank."""
        with open_plain(self.path, self.compression) as stream:
            position = 0 if self.compression else stream.seek(cut.start)
            for number, line in enumerate(lines_of(stream), cut.number):
                if line is None:
                    yield Entry(number, "", too_long("line"))
                elif line.strip():
                    yield self._entry(number, line)
                position = stream.tell() if line is None else position + len(line)
                if position >= cut.end and not self.compression:
                    break

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            # files with byte order marks may have been concatenated
            record = json.loads(line.removeprefix(BOM).decode())
        except UnicodeDecodeError as error:
            return Entry(number, "", f"this line is not UTF-8: {error}")
        except (ValueError, RecursionError) as error:
            return Entry(number, "", f"this line is not JSON: {error}")
        return _record_entry(number, record, self.key, "line")


class JsonValues(Undivided):
    """A JSON file that holds one object, or an array of objects, which are counted from 0.

    It is read as a stream, so the memory is that of one element.
    """

    first = 0

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per element."""
        place = cut.number
        with open_plain(self.path, self.compression) as stream:
            try:
                for record in elements(io.TextIOWrapper(stream, "utf-8-sig")):
                    yield _record_entry(place, record, self.key, "element")
                    place += 1
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{self.path} is not JSON after element {place}: {error}\n"
                    f"  do: write it again, or as JSON lines: jq -c '.[]' {self.path} > new.jsonl"
                ) from error


def elements(stream: io.TextIOWrapper) -> Iterator[object]:
    """Yield the elements of an array, or the objects of a file without one."""
    decode, text = json.JSONDecoder().raw_decode, stream.read(READ_BYTES).lstrip()
    start = is_array = int(text.startswith("["))
    while True:
        start = _BETWEEN.match(text, start).end()  # type: ignore[union-attr]  # it always matches
        if is_array and text.startswith("]", start):
            if (text[start + 1 :] + stream.read(READ_BYTES)).strip():
                raise ValueError("there is more after the end of the array")
            return
        try:
            value, end = decode(text, start)
            if end < len(text):  # else a number may go on
                yield value
                start = end
                continue
        except ValueError as error:
            problem = error
        unread = len(text) - start
        if unread > source_format.LONGEST_DOCUMENT_BYTES:
            raise ValueError(too_long("element"))
        more = stream.read(max(unread, READ_BYTES))  # twice the text: the time remains linear
        if not more and text.endswith("\n"):
            if unread or is_array:
                raise problem if unread else ValueError("the end of the array is missing")
            return
        text, start = text[start:] + (more or "\n"), 0


def _record_entry(place: int, record: object, key: str, unit: str) -> Entry:
    """Return the entry for a JSON value, at a place that is called `unit`."""
    if isinstance(record, dict) and key in record:
        problem = f"the key '{key}' holds {kind_of(record[key])}, no text"
        return text_entry(place, record[key], problem)
    return text_entry(place, None, f"no text under the key '{key}' (this {unit} {keys_in(record)})")


def keys_in(record: object) -> str:
    """Say which keys a JSON value has, also one level below."""
    if not isinstance(record, dict):
        return f"is {kind_of(record)}"
    below = {name: value for name, value in record.items() if isinstance(value, dict)}
    names = (f"{k}: {{{', '.join(below[k])}}}" if k in below else k for k in record)
    advice = "; a text in braces is not read: copy it to a key outside" if below else ""
    return "has: " + ", ".join(names)[:_SHOWN_CHARACTERS] + advice


class Csv(Undivided):
    """A CSV file: each row after the header is a document. The first has number 1.

    The file has a single cut, because a quoted field may contain line breaks.
    """

    delimiter, separators = ",", "commas"

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per row that is not blank."""
        csv.field_size_limit(LONGEST_DOCUMENT_BYTES)
        with open_plain(self.path, self.compression) as stream:
            rows = csv.reader(self._lines(stream), delimiter=self.delimiter, strict=True)
            header, place = list[str](), cut.number - 1
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except csv.Error as error:
                    row, problem = [], f"this row cannot be read: {error}"
                else:
                    if not row:
                        continue
                    problem = f"this row has {len(row)} fields, the header {len(header)}"
                if place < cut.number:
                    header, column = row, self._column(row)
                elif len(row) != len(header):
                    yield Entry(place, "", problem)
                elif any("\udc80" <= character <= "\udcff" for character in row[column]):
                    yield Entry(place, "", "this row is not UTF-8")
                else:
                    yield text_entry(place, row[column], "")
                place += 1

    def _column(self, header: list[str]) -> int:
        if (columns := header.count(self.key)) == 1:
            return header.index(self.key)
        if columns:
            raise DataError(
                f"{self.path}: {columns} columns in the header are called '{self.key}'\n"
                "  do: rename all but the one that holds the text"
            )
        raise DataError(
            f"{self.path}: no column '{self.key}' in the header (separated by "
            f"{self.delimiter!r} it has: {', '.join(name[:40] for name in header)[:200]})\n"
            "  do: set data.text_key to the column of the text, add a header, or write with "
            f"{self.separators}"
        )

    def _lines(self, stream: io.BufferedReader) -> Iterator[str]:
        """Yield lines, with surrogates in the place of bytes that are not UTF-8."""
        for number, line in enumerate(lines_of(stream), 1):
            if line is None:
                problem = f"{self.path}, line {number}: {too_long('line')}"
                raise DataError(f"{problem}\n  do: divide this line, or remove it")
            yield (line.removeprefix(BOM) if number == 1 else line).decode(errors="surrogateescape")


class Tsv(Csv):
    """A TSV file, read as a CSV file with tabs."""

    delimiter, separators = "\t", "tabs"


class Parquet(Format):
    """A Parquet file: each row is a document. Rows are counted from 0.

    Parquet stores rows in row groups. A cut is a range of row groups.
    """

    mark = ":"

    def scan(self) -> Scan:
        """Digest the file and divide it into cuts between row groups."""
        with self._open() as file:
            names = file.schema_arrow.names
            if self.key not in names:
                raise DataError(
                    f"{self.path}: no column '{self.key}' (it has: {', '.join(names)})\n"
                    "  do: set data.text_key to the column that holds the text"
                )
            cuts = tuple(_cuts(file.metadata))
        return Scan(sha256_of(self.path), cuts, "it has no rows")

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per row of a cut."""
        row = cut.number
        with self._open() as file:
            groups = list(range(cut.start, cut.end))
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=groups, columns=[self.key], use_threads=False
            ):
                for value in batch.column(0):
                    yield self._entry(row, value)
                    row += 1

    def _entry(self, row: int, value: Any) -> Entry:
        try:
            found = value.as_py()
        except UnicodeDecodeError as error:
            return Entry(row, "", f"this row is not UTF-8: {error}")
        if isinstance(found, str) and len(found) > LONGEST_DOCUMENT_BYTES:
            return Entry(row, "", too_long("row"))
        what = f"the column '{self.key}' holds {kind_of(found)}, no text"
        return text_entry(row, found, what)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            import pyarrow
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(
                f"{self.path}: reading it needs pyarrow\n  do: {install_command('formats')}"
            ) from None
        try:
            with ParquetFile(self.path) as file:
                yield file
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(
                f"{self.path} is damaged: {error}\n  do: write it again, or remove it"
            ) from error


def _cuts(metadata: Any) -> Iterator[Cut]:
    """Combine consecutive row groups into cuts of about CUT_BYTES of uncompressed data."""
    first_group = first_row = rows = size = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        size += metadata.row_group(group).total_byte_size
        if size >= CUT_BYTES or group == metadata.num_row_groups - 1:
            if rows:
                yield Cut(first_group, group + 1, first_row, size)
            first_group, first_row, rows, size = group + 1, first_row + rows, 0, 0
