"""A worker's task: read a part of the source, tokenise it, and leave it on the disk."""

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from frontier_llm.data.corpus import Document, Source
from frontier_llm.data.encoder import Encoder
from frontier_llm.data.formats import Entry
from frontier_llm.data.parts import SPLITS, Leftovers, Part, PartFiles
from frontier_llm.errors import DataError

LONGEST_DOCUMENT_TOKENS = 2**31 - 1
"""megatron's index counts the tokens of a document in 32 bits."""
_LOW_64_BITS = 2**64 - 1


@dataclass(frozen=True)
class Reader:
    """Reads parts of a source."""

    source: Source
    skip_broken: bool
    """Whether what is no text is counted and left out, instead of being an error."""

    def documents(self, part: Part, leftovers: Leftovers) -> Iterator[tuple[int, int, Document]]:
        """Yield (file, place, document) of a part, in order, and count what is none.

        Raises:
            DataError: a file cannot be read, or something in it is broken.
        """
        for file, cut in part.cuts:
            for entry in self.source.entries(file, cut):
                name = self.source.name(file, entry.place)
                if entry.problem is not None:
                    self._leave_out(name, entry, leftovers)
                elif not entry.text:
                    leftovers.empty += 1
                else:
                    yield file, entry.place, Document(name, entry.text)

    def _leave_out(self, name: str, entry: Entry, leftovers: Leftovers) -> None:
        if not self.skip_broken:
            raise DataError(
                f"{self.source.folder / name}: {entry.problem}\n"
                "  do: mend it, set data.text_key to the field that holds the text, or leave what "
                "is broken out (data.broken=skip: it is counted)"
            )
        leftovers.add_broken(f"{name}: {entry.problem}")


class PartWriter:
    """Tokenises parts. For one process."""

    def __init__(
        self, reader: Reader, encoder: Encoder, files: PartFiles, validation_percent: float
    ) -> None:
        self._reader, self._encoder, self._files = reader, encoder, files
        self._percent = validation_percent

    def write(self, part: Part) -> None:
        """Write all files of a part; others may be writing the very same ones.

        Raises:
            DataError: the source cannot be used.
            OSError: the disk is full, or failed.
        """
        leftovers = Leftovers()
        drafts = [_draft(self._files.tokens(part.number, split)) for split in range(len(SPLITS))]
        with drafts[0].open("wb") as train, drafts[1].open("wb") as validation:
            rows = self._write_tokens(part, (train, validation), leftovers)
            for stream in (train, validation):
                stream.flush()
                os.fsync(stream.fileno())
        for split, draft in enumerate(drafts):
            draft.replace(self._files.tokens(part.number, split))
        table = _draft(self._files.documents(part.number))
        with table.open("wb") as stream:
            rows.tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
        table.replace(self._files.documents(part.number))
        self._files.write_note(part.number, leftovers)

    def _write_tokens(
        self, part: Part, streams: Sequence[IO[bytes]], leftovers: Leftovers
    ) -> "array[int]":
        """Write the tokens of all documents; return their rows, one after another."""
        rows = array("Q")
        token_bytes = len(self._encoder.eod)
        for file, place, document in self._reader.documents(part, leftovers):
            text = document.text.encode()
            split = int(document.is_validation(self._percent))
            tokens = self._encoder.encode(document.text) + self._encoder.eod
            count = len(tokens) // token_bytes
            if count > LONGEST_DOCUMENT_TOKENS:
                raise DataError(
                    f"{document.name} has {count} tokens, more than an index can say "
                    f"({LONGEST_DOCUMENT_TOKENS})\n  do: cut it into several documents"
                )
            streams[split].write(tokens)
            digest = xxhash.xxh3_128_intdigest(text)
            high, low = digest >> 64, digest & _LOW_64_BITS
            rows.extend((split, file, place, count, len(text), high, low))
        return rows


def _draft(path: Path) -> Path:
    """Name a file that nobody else writes, beside the one it will replace."""
    return path.with_name(f"{path.name}-{os.getpid()}.draft")
