"""Read Parquet files: one document per row, with the text in a column.

The class implements the interface of data/source_format.py: `scan` finds the *cuts*, the ranges of
a file that workers can read independently, and `entries` yields the texts of one cut.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from frontier_llm.data.source_format import (
    CUT_BYTES,
    LONGEST_DOCUMENT_BYTES,
    Cut,
    Entry,
    Format,
    Scan,
    kind_of,
    sha256_of,
    text_entry,
    too_long,
)
from frontier_llm.errors import DataError

BATCH_ROWS = 256
"""Number of rows that are decoded at a time."""


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
                f"{self.path}: reading it needs pyarrow\n  do: pip install -e '.[formats]'"
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
