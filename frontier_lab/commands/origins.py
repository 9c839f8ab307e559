"""Trace the tokens of a prepared corpus back to the files of its source."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frontier_llm.data.corpus_manifest import FILES_FILE, damaged, printable
from frontier_llm.data.prepared_corpus import TokenStream


@dataclass(frozen=True)
class Origin:
    """The place in the source from which a document of a split was read."""

    document: int
    first_token: int
    file: str
    """Path of the source file relative to the source folder."""
    place: int
    """Number of the line, row or section in the file."""


def find_origins(stream: TokenStream, start: int, count: int) -> Iterator[Origin]:
    """Yield the origins of all documents that overlap a range of tokens, in order."""
    folder, split = stream.prefix.parent, stream.prefix.name
    first, last = stream.document_at(start), stream.document_at(start + count - 1)
    try:
        places = np.memmap(stream.prefix.with_suffix(".places"), dtype=np.int64, mode="r")
        files = _files_with_documents(folder / FILES_FILE, split)
    except (OSError, ValueError, KeyError) as error:
        raise damaged(folder / FILES_FILE, f"tokens cannot be traced to it: {error}") from error
    file, end = next(files)
    for document in range(first, last + 1):
        while document >= end:
            file, end = next(files)
        start_of = stream.document_start(document)
        yield Origin(document, start_of, printable(file), int(places[document]))


def _files_with_documents(path: Path, split: str) -> Iterator[tuple[str, int]]:
    """Yield (name, index of the first document after the file) of each file with documents."""
    end = 0
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            end += entry[split]
            if entry[split]:
                yield entry["name"], end
