"""Build micro-batches of samples whose documents have borders.

The borders matter if documents are separate (data.documents), and if samples consist of whole
documents and padding (data.packing). In both cases some labels are masked in the loss:

- Padding is not predicted.
- The first token of a document is not predicted by the document before it, if documents are
  separate. In a sample of whole documents the last one predicts nothing beyond the sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.data.batch import Batch
from frontier_llm.data.prepared_corpus import Samples

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """The window of a sample with L tokens."""

    tokens: Tokens
    """[L + 1] int64: the inputs, and the label of the last one."""
    lengths: Tokens
    """[documents] int64, number of inputs of each document, which may be a part of it."""
    continues: bool
    """Whether the last document continues after the sample, so that its last input has a label."""
    denoisers: tuple[int, ...] = ()
    """In an encoder-decoder the number of the denoiser of each text; `tokens` are the texts."""

    @property
    def padding(self) -> int:
        """Number of inputs after the last document."""
        return len(self.tokens) - 1 - int(self.lengths.sum())


class DocumentSamples(Samples):
    """The samples of a run that cut the sequence of all documents, with the borders in them."""

    def __getitem__(self, index: int) -> Row:
        """Return sample `index` of the run."""
        begins, ranges = self.stream.documents_within, self.ranges(index)
        borders, inputs = [np.zeros(1, np.int64)], 0
        for start, count in ranges:  # a border is where a document begins, and where a range ends
            borders += [begins(start + 1, count - 1) - start + inputs, np.array([inputs + count])]
            inputs += count
        ends = np.concatenate(borders)
        continues = int(ends[-2]) < inputs - 1
        ends = np.append(ends[ends < inputs - 1], inputs - 1)
        return Row(self.read(index), np.diff(ends), continues)


def document_batch(rows: Sequence[Row], indices: Sequence[int], *, separate: bool) -> Batch:
    """Build a micro-batch for next-token prediction from samples of the same length.

    If documents are separate, they read only themselves. The indices are not used.
    """
    stacked = torch.from_numpy(np.stack([row.tokens for row in rows]))
    tokens, labels = stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
    length = tokens.shape[1]
    mask = torch.from_numpy(np.stack([_mask(row, separate=separate) for row in rows]))
    if not separate:
        return Batch(tokens, labels, torch.arange(length).repeat(len(rows), 1), mask)
    borders = [_borders(row) for row in rows]
    positions = np.stack([_positions(row_borders) for row_borders in borders])
    return Batch(tokens, labels, torch.from_numpy(positions), mask, border_table(borders, length))


def border_table(borders: Sequence[Sequence[int] | Tokens], length: int) -> torch.Tensor:
    """Stack the borders of rows of a length, [rows, k] int32; the length fills up short ones."""
    table = np.full((len(borders), max(map(len, borders))), length, np.int32)
    for line, row_borders in zip(table, borders, strict=True):
        line[: len(row_borders)] = row_borders
    return torch.from_numpy(table)


def _mask(row: Row, *, separate: bool) -> npt.NDArray[np.float32]:
    """Return the weight of each label, [L]."""
    mask = np.ones(len(row.tokens) - 1, np.float32)
    ends = np.cumsum(row.lengths)
    mask[ends[-1] :] = 0
    if separate:
        mask[ends[:-1] - 1] = 0
    if not row.continues:
        mask[ends[-1] - 1] = 0
    return mask


def _borders(row: Row) -> Tokens:
    """Return the cumulative lengths of a row, of which padding is the last document."""
    lengths = np.append(row.lengths, row.padding) if row.padding else row.lengths
    return np.concatenate([[0], np.cumsum(lengths)])


def _positions(borders: Tokens) -> Tokens:
    return np.arange(borders[-1]) - np.repeat(borders[:-1], np.diff(borders))
