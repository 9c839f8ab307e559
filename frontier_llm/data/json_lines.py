"""Read JSON files, plain or compressed, whose objects have their texts under a key.

The classes implement the interface of data/source_format.py: `scan` finds the *cuts*, the ranges
of a file that workers can read independently, and `entries` yields the texts of one cut.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator

from frontier_llm.data import source_format
from frontier_llm.data.compression import READ_BYTES, open_plain
from frontier_llm.data.source_format import (
    BOM,
    CUT_BYTES,
    Cut,
    Entry,
    Scan,
    Undivided,
    kind_of,
    lines_of,
    text_entry,
    too_long,
)
from frontier_llm.errors import DataError

_SHOWN_CHARACTERS = 200
"""Length of the list of keys in an error."""
_BETWEEN = re.compile(r"[\s,]*")
"""What is between the elements of an array."""


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
        """Yield an entry per element.

        Raises:
            DataError: the file is not JSON. What follows the damaged place cannot be read.
        """
        place = cut.number
        with open_plain(self.path, self.compression) as stream:
            try:
                for record in _elements(io.TextIOWrapper(stream, "utf-8-sig")):
                    yield _record_entry(place, record, self.key, "element")
                    place += 1
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{self.path} is not JSON after element {place}: {error}\n"
                    f"  do: write it again, or as JSON lines: jq -c '.[]' {self.path} > new.jsonl"
                ) from error


def _elements(stream: io.TextIOWrapper) -> Iterator[object]:
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
    has = f"is {kind_of(record)}"
    if isinstance(record, dict):
        has = "has: " + ", ".join(map(str, record))[:_SHOWN_CHARACTERS]
    return text_entry(place, None, f"no text under the key '{key}' (this {unit} {has})")
