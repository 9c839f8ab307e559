"""Read JSONL files, plain or compressed: one JSON object per line, with the text under a key.

The class implements the interface of data/source_format.py: `scan` finds the *cuts*, the ranges
of a file that workers can read independently, and `entries` yields the texts of one cut.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property

from frontier_llm.data.compression import READ_BYTES, open_plain
from frontier_llm.data.source_format import (
    BOM,
    CUT_BYTES,
    Cut,
    Entry,
    Scan,
    Undivided,
    lines_of,
    record_entry,
    too_long,
)


class JsonLines(Undivided):
    """A JSONL file: each line that is not blank is a document.

    Lines end in LF or CR LF, or in CR if the file begins with lines that do. A compressed file has
    a single cut, because it can only be read from its start.
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
                line += block.count(self._newline)
                is_full = position - cut_start >= CUT_BYTES
                if is_full and (newline := block.rfind(self._newline)) >= 0:
                    cut_end = position - len(block) + newline + 1
                    cuts.append(Cut(cut_start, cut_end, cut_line, cut_end - cut_start))
                    cut_start, cut_line = cut_end, line
        if position > cut_start:
            cuts.append(Cut(cut_start, position, cut_line, position - cut_start))
        return Scan(hasher.hexdigest(), tuple(cuts))

    def entries(self, cut: Cut) -> Iterator[Entry]:
        """Yield an entry per line of a cut that is not blank."""
        with open_plain(self.path, self.compression) as stream:
            end = None if self.compression else cut.end
            position = 0 if end is None else stream.seek(cut.start)
            for number, line in enumerate(lines_of(stream, self._newline), cut.number):
                if line is None:
                    yield Entry(number, "", too_long("line"))
                    position = stream.tell() if end is not None else 0
                elif line.strip():
                    yield self._entry(number, line)
                position += len(line or b"")
                if end is not None and position >= end:
                    break

    @cached_property
    def _newline(self) -> bytes:
        with open_plain(self.path, self.compression) as stream:
            block = stream.read(READ_BYTES)
        return b"\r" if b"\r" in block and b"\n" not in block else b"\n"

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            # files with byte order marks may have been concatenated
            record = json.loads(line.removeprefix(BOM).decode())
        except UnicodeDecodeError as error:
            return Entry(number, "", f"this line is not UTF-8: {error}")
        except (ValueError, RecursionError) as error:
            return Entry(number, "", f"this line is not JSON: {error}")
        return record_entry(number, record, self.key, "line")
