"""Read one part of a source, tokenise it and write its files. Each worker process runs this."""

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from frontier_llm.data.corpus_parts import SPLITS, Part, PartFiles, SkippedTexts
from frontier_llm.data.encoder import Encoder
from frontier_llm.data.source import Document, Source
from frontier_llm.data.source_format import Entry
from frontier_llm.errors import DataError

LONGEST_DOCUMENT_TOKENS = 2**31 - 1
"""Limit of Megatron's index, which stores the length of a document as int32."""
_LOW_64_BITS = 2**64 - 1


@dataclass(frozen=True)
class PartReader:
    """Reads the documents of parts of a source."""

    source: Source
    skip_broken: bool
    """If true, entries (lines, rows or sections of a file) that are not text are counted and left
    out. Otherwise they raise an error."""

    def documents(self, part: Part, skipped: SkippedTexts) -> Iterator[tuple[int, int, Document]]:
        """Yield the documents of a part in order."""
        for file, cut in part.cuts:
            for entry in self.source.entries(file, cut):
                name = self.source.name(file, entry.place)
                if entry.problem is not None:
                    self._skip(name, entry, skipped)
                elif not entry.text:
                    skipped.empty += 1
                else:
                    skipped.text.replaced += entry.replaced
                    yield file, entry.place, Document(name, entry.text)

    def _skip(self, name: str, entry: Entry, skipped: SkippedTexts) -> None:
        if not self.skip_broken:
            raise DataError(
                f"{self.source.folder / name}: {entry.problem}\n"
                "  do: repair it, set data.text_key to the field that holds the text, or skip and "
                "count such entries with data.broken=skip"
            )
        skipped.add_broken(f"{name}: {entry.problem}")


class PartWriter:
    """Tokenises parts and writes their files. Each process needs its own."""

    def __init__(
        self, reader: PartReader, encoder: Encoder, files: PartFiles, validation_percent: float
    ) -> None:
        self._reader, self._encoder, self._files = reader, encoder, files
        self._percent = validation_percent

    def write(self, part: Part) -> None:
        """Write all files of a part.

        Each file is written under a temporary name and renamed, so other processes may write the
        same part at the same time.
        """
        skipped = SkippedTexts()
        drafts = [_draft(self._files.tokens(part.number, split)) for split in range(len(SPLITS))]
        with drafts[0].open("wb") as train, drafts[1].open("wb") as validation:
            rows = self._write_tokens(part, (train, validation), skipped)
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
        self._files.write_note(part.number, skipped)

    def _write_tokens(
        self, part: Part, streams: Sequence[IO[bytes]], skipped: SkippedTexts
    ) -> "array[int]":
        """Write the tokens of all documents of a part."""
        rows = array("Q")
        token_bytes = len(self._encoder.eod)
        for file, place, document in self._reader.documents(part, skipped):
            text = document.text.encode()
            split = int(document.is_validation(self._percent))
            tokens = self._encoder.encode(document.text, skipped.text) + self._encoder.eod
            count = len(tokens) // token_bytes
            if count > LONGEST_DOCUMENT_TOKENS:
                raise DataError(
                    f"{document.name} has {count} tokens, more than an index file can represent "
                    f"({LONGEST_DOCUMENT_TOKENS})\n  do: split it into several documents"
                )
            streams[split].write(tokens)
            text_hash = xxhash.xxh3_128_intdigest(text)
            high, low = text_hash >> 64, text_hash & _LOW_64_BITS
            rows.extend((split, file, place, count, len(text), high, low))
        return rows


def _draft(path: Path) -> Path:
    """Return a temporary path in the same folder that no other process of this host writes."""
    return path.with_name(f"{path.name}-{os.getpid()}.draft")
