"""The validation samples of a run: the first windows of each corpus, each of them once."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from frontier_llm.data.document_rows import Row

if TYPE_CHECKING:
    from frontier_llm.data.corpora import CorpusSamples


class ValidationWindows:
    """The samples of one corpus after those of another. They have nothing beyond their end."""

    def __init__(
        self, samples: "Sequence[CorpusSamples]", shares: Sequence[float], wanted: int
    ) -> None:
        """Choose the samples.

        Args:
            samples: the samples of the validation split of each corpus, in order.
            shares: share of each corpus.
            wanted: number of samples in all. A corpus contributes its share, at least one, and at
                most all that it has.
        """
        counts = [
            min(len(windows), max(1, round(share * wanted)))
            for windows, share in zip(samples, shares, strict=True)
        ]
        self._samples, self._ends = samples, list(accumulate(counts))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1]

    def corpus(self, index: int) -> int:
        """Return the number of the corpus of a sample; the last one beyond the end."""
        return min(bisect_right(self._ends, index), len(self._ends) - 1)

    def __getitem__(self, index: int) -> Any:
        """Return the window of a sample."""
        corpus, number = self._locate(index)
        return self._samples[corpus][number]

    def row(self, index: int, *, reads: bool = True) -> Row:
        """Return a sample of a run whose samples have documents."""
        corpus, number = self._locate(index)
        samples: Any = self._samples[corpus]
        row: Row = samples.row(number, reads=reads)
        return row

    def _locate(self, index: int) -> tuple[int, int]:
        assert index < len(self), "a validation sample is read once"
        corpus = self.corpus(index)
        return corpus, index - (self._ends[corpus - 1] if corpus else 0)
