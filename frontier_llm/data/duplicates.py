"""Documents that are there before, letter for letter.

Documents are compared by 128 bits of xxh3 of their text, in rounds of those whose hashes begin
alike, so that memory stays bounded however many there are. Of equal ones the first in the order of
the source is kept, whichever split it is in.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from frontier_llm.data.parts import COLUMNS, PartFiles

ROUND_DOCUMENTS = 1 << 22
_HIGH, _LOW = COLUMNS.index("hash_high"), COLUMNS.index("hash_low")


def find_duplicates(files: PartFiles, counts: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """Return for each part which of its documents are repetitions: a byte a document.

    Args:
        files: the parts, all done.
        counts: documents of each part.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    repeated = np.zeros(int(starts[-1]), dtype=np.bool_)
    bits = max(0, (int(starts[-1]) // ROUND_DOCUMENTS).bit_length())
    for head in range(1 << bits):
        _mark_round(files, starts, bits, head, repeated)
    return [repeated[start:end] for start, end in pairwise(starts)]


def _mark_round(
    files: PartFiles,
    starts: npt.NDArray[np.int64],
    bits: int,
    head: int,
    repeated: npt.NDArray[np.bool_],
) -> None:
    """Mark repetitions among the documents whose hashes begin with `bits` bits of `head`."""
    found = [np.empty((3, 0), dtype=np.uint64)]
    for part, start in enumerate(starts[:-1]):
        rows = files.rows(part)
        chosen = rows[:, _HIGH] >> np.uint64(64 - bits) == head if bits else slice(None)
        numbers = np.arange(start, start + len(rows), dtype=np.uint64)
        columns = (rows[:, _HIGH], rows[:, _LOW], numbers)
        found.append(np.stack([column[chosen] for column in columns]))
    high, low, number = np.concatenate(found, axis=1)
    order = np.lexsort((number, low, high))
    high, low, number = high[order], low[order], number[order]
    same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    repeated[number[1:][same]] = True
