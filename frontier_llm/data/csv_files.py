"""Read CSV and TSV files with a header: one document per row, with the text in a column.

The classes implement the interface of data/source_format.py.
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


class Csv(Undivided):
    """A CSV file: each row after the header is a document. The first has number 1.

    The file has a single cut, because a quoted field may contain line breaks.
    """

    delimiter = ","

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
        if self.key in header:
            return header.index(self.key)
        raise DataError(
            f"{self.path}: no column '{self.key}' in the header (it has: "
            f"{', '.join(header)[:200]})\n"
            "  do: set data.text_key to the column that holds the text, or add a header"
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

    delimiter = "\t"
