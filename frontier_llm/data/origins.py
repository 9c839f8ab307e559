"""From a token of a split back to the document and the file it came from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frontier_llm.data.datasets import TokenStream
from frontier_llm.data.manifest import FILES_FILE
from frontier_llm.errors import DataError


@dataclass(frozen=True)
class Origin:
    """Where a document of a split came from."""

    document: int
    """Its number in the split."""
    first_token: int
    """Where it begins in the split."""
    file: str
    """Name of its file below the source."""
    place: int
    """Number of its line, row or piece there."""


def find_origins(stream: TokenStream, start: int, count: int) -> Iterator[Origin]:
    """Yield the documents that a stretch of tokens touches, in order.

    Args:
        stream: a split.
        start: first token.
        count: how many.

    Raises:
        DataError: the lists beside the split are missing.
    """
    folder, split = stream.prefix.parent, stream.prefix.name
    first, last = stream.document_at(start), stream.document_at(start + count - 1)
    try:
        places = np.memmap(stream.prefix.with_suffix(".places"), dtype=np.int64, mode="r")
        files = _files(folder / FILES_FILE, split)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the prepared corpus {folder} cannot be traced back: {error}\n"
            "  do: delete this folder; it is prepared again at the next start"
        ) from error
    file, end = next(files)
    for document in range(first, last + 1):
        while document >= end:
            file, end = next(files)
        yield Origin(document, stream.document_start(document), file, int(places[document]))


def _files(path: Path, split: str) -> Iterator[tuple[str, int]]:
    """Yield (name, number of the first document behind it) of each file with documents."""
    end = 0
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            end += entry[split]
            if entry[split]:
                yield entry["name"], end
