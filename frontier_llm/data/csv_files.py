"""Read CSV and TSV files with a header: one document per row, with the text in a column.

The classes implement the interface of data/source_format.py. A file has a single cut, because a
quoted field may contain line breaks.
"""

import csv
import io
from collections.abc import Iterator

from frontier_llm.data.compression import open_plain
from frontier_llm.data.source_format import (
    BOM,
    LONGEST_DOCUMENT_BYTES,
    Cut,
    Entry,
    Undivided,
    lines_of,
    text_entry,
    too_long,
)
from frontier_llm.errors import DataError

LONGEST_HEADER = 200
"""Number of characters of a header that an error shows."""


class Csv(Undivided):
    """A CSV file: each row after the header is a document. The first has number 1."""

    delimiter = ","

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per row that is not blank."""
        csv.field_size_limit(LONGEST_DOCUMENT_BYTES)
        with open_plain(self.path, self.compression) as stream:
            rows = csv.reader(self._lines(stream), delimiter=self.delimiter, strict=True)
            header = self._header(rows)
            column, place = header.index(self.key), cut.number - 1
            while True:
                place += 1
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except csv.Error as error:
                    yield Entry(place, "", f"this row cannot be read: {error}")
                    continue
                if not row:
                    continue
                if len(row) != len(header):
                    found = f"this row has {len(row)} fields, the header {len(header)}"
                    yield Entry(place, "", found)
                elif any("\udc80" <= character <= "\udcff" for character in row[column]):
                    yield Entry(place, "", "this row is not UTF-8")
                else:
                    yield text_entry(place, row[column], "")

    def _header(self, rows: Iterator[list[str]]) -> list[str]:
        try:
            header = next(rows, [])
        except csv.Error as error:
            raise DataError(
                f"{self.path} has no header: {error}\n  do: write it again, as CSV or JSON lines"
            ) from error
        if self.key not in header:
            names = ", ".join(header)[:LONGEST_HEADER]
            raise DataError(
                f"{self.path}: no column '{self.key}' in the header (it has: {names})\n"
                "  do: set data.text_key to the column that holds the text, or add a header"
            )
        return header

    def _lines(self, stream: io.BufferedReader) -> Iterator[str]:
        """Yield lines, with surrogates in the place of bytes that are not UTF-8."""
        for number, line in enumerate(lines_of(stream)):
            if line is None:
                raise DataError(
                    f"{self.path}, line {number + 1}: {too_long('line')}\n  do: divide this line"
                )
            text = (line.removeprefix(BOM) if number == 0 else line).decode(
                errors="surrogateescape"
            )
            if "\r" in text[:-2]:  # lines that end in CR alone
                yield from io.StringIO(text, newline="")
            else:
                yield text


class Tsv(Csv):
    """A TSV file, read as a CSV file with tabs."""

    delimiter = "\t"
