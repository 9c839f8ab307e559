"""The validation samples of a run: the first windows of each corpus, each of them once."""

from collections.abc import Sequence
from typing import Any

from frontier_llm.data.document_rows import Row


class ValidationWindows:
    """The samples of one corpus after those of another. They have nothing beyond their end.

    Each corpus contributes its share of the `wanted` samples: at least one, and at most all that it
    has.
    """

    def __init__(self, samples: Sequence[Any], shares: Sequence[float], wanted: int) -> None:
        counts = [
            min(len(windows), max(1, round(share * wanted)))
            for windows, share in zip(samples, shares, strict=True)
        ]
        self._samples = samples
        self._places = [(corpus, k) for corpus, count in enumerate(counts) for k in range(count)]

    def __len__(self) -> int:
        return len(self._places)

    def corpus(self, index: int) -> int:
        """Return the number of the corpus of a sample; 0 beyond the end."""
        return self._places[index][0] if index < len(self) else 0

    def __getitem__(self, index: int) -> Any:
        corpus, number = self._places[index]
        return self._samples[corpus][number]

    def row(self, index: int, *, reads: bool = True) -> Row:
        """Return a sample of a run whose samples have documents."""
        corpus, number = self._places[index]
        row: Row = self._samples[corpus].row(number, reads=reads)
        return row
