"""Read JSON files that hold one object, or one array of objects, each with its text under a key.

The class implements the interface of data/source_format.py. It reads an array as a stream, so the
memory is that of one element.
"""

import codecs
import io
import json
from collections.abc import Iterator

from frontier_llm.data.compression import READ_BYTES, open_plain
from frontier_llm.data.source_format import (
    LONGEST_DOCUMENT_BYTES,
    Cut,
    Entry,
    Undivided,
    record_entry,
    too_long,
)
from frontier_llm.errors import DataError

_BLANK = " \t\r\n\ufeff"


class JsonValues(Undivided):
    """A JSON file: each element of its array is a document. Elements are counted from 0."""

    first = 0

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per element of the array, or one for the only object.

        Raises:
            DataError: the file is not JSON. What follows the damaged place cannot be read.
        """
        with open_plain(self.path, self.compression) as stream:
            text = _Characters(stream)
            try:
                for place, record in enumerate(_records(text), cut.number):
                    yield record_entry(place, record, self.key, "element")
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{self.path} is not JSON after character {text.consumed}: {error}\n"
                    "  do: write it again, one object per line, as a .jsonl file: "
                    f"jq -c '.[]' {self.path.name} > new.jsonl"
                ) from error


class _Characters:
    """The characters of a stream that are not parsed yet."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.start, self.consumed, self.is_complete = "", 0, 0, False

    def peek(self) -> str:
        """Skip white space and return the next character; "" at the end."""
        while True:
            while self.start < len(self.text) and self.text[self.start] in _BLANK:
                self.start += 1
            if self.start < len(self.text):
                return self.text[self.start]
            if self.is_complete:
                return ""
            self.read_more(READ_BYTES)

    def skip(self) -> None:
        """Skip a character."""
        self.start += 1

    def read_more(self, count: int) -> None:
        """Forget the parsed characters and read about `count` further bytes."""
        block = self._stream.read(count)
        self.is_complete = not block
        self.consumed += self.start
        decoded = self._decoder.decode(block, final=self.is_complete)
        self.text, self.start = self.text[self.start :] + decoded, 0

    def value(self) -> object:
        """Parse the next value.

        Raises:
            ValueError: it is not JSON, or too long.
        """
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.start)
                if end < len(self.text) or self.is_complete:  # else a number may go on
                    self.start = end
                    return value
            except ValueError:
                if self.is_complete:
                    raise
            unread = len(self.text) - self.start
            if unread > LONGEST_DOCUMENT_BYTES:
                raise ValueError(too_long("element"))
            self.read_more(max(unread, READ_BYTES))  # twice the text: the time remains linear


def _records(text: _Characters) -> Iterator[object]:
    if text.peek() != "[":
        yield text.value()
    else:
        text.skip()
        while text.peek() != "]":
            yield text.value()
            if (following := text.peek()) not in (",", "]"):
                raise ValueError(f"expected ',' or ']', found {following!r}")
            if following == ",":
                text.skip()
        text.skip()
    if text.peek():
        raise ValueError("there is more after the end")
