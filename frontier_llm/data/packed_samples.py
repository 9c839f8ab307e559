"""The samples of packed documents, epoch after epoch."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from frontier_llm.data.document_rows import Row
from frontier_llm.data.packing import Packing
from frontier_llm.data.permutation import make_key
from frontier_llm.data.prepared_corpus import TokenStream
from frontier_llm.data.sample_order import Kept, LengthSegment, SampleOrder
from frontier_llm.errors import DataError

PAD = 0
"""Token id of padding, which no label and no other token reads."""


class PackedSamples:
    """The samples of a run, epoch after epoch, in the order of the corpus or shuffled.

    An epoch reads every packed sample once, but those that predict nothing. The seed and the digest
    of the corpus (`Manifest.digest`) determine the order. Without `reads` all tokens are zeros.
    """

    def __init__(
        self,
        stream: TokenStream,
        packing: Packing,
        seed: int,
        digest: str,
        *,
        shuffle: bool = True,
        separate: bool = False,
        reads: bool = True,
    ) -> None:
        if not len(stream):
            raise DataError(f"{stream.prefix}.bin has no document\n  do: add text")
        self._stream, self._reads = stream, reads
        self.packing = packing
        self._kept = Kept(len(self.packing), self._without_labels(separate))
        key = lru_cache(maxsize=4)(lambda epoch: make_key(digest, seed, epoch))
        # an order of windows of one "token", which is a packed sample
        self._order = SampleOrder(1, lambda _: self._kept, key if shuffle else None)
        if not len(self):
            raise DataError(f"no sample of {stream.prefix}.bin predicts a token\n  do: add text")

    def _without_labels(self, separate: bool) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples that predict nothing.

        All their pieces have one token, after which the document ends. The last piece predicts
        nothing then, and if documents are separate, neither do the others. In an encoder-decoder
        all samples predict something.
        """
        if self.packing.pairs is not None:
            return np.zeros(0, np.int64)
        first, lengths = self.packing.first_pieces[:-1], self.packing.lengths
        sizes = (np.maximum if separate else np.add).reduceat(lengths, first)
        numbers = np.flatnonzero(sizes == 1)
        if self.packing.length == 1:
            following = self.packing.starts[first[numbers]] + 1
            ends = np.append(self._stream.document_starts(), len(self._stream))
            numbers = numbers[np.isin(following, ends)]
        return numbers

    def set_lengths(self, segments: Sequence[LengthSegment]) -> None:
        """Read all samples in a run of an older version. The length of samples cannot change."""
        if segments[-1].keeps_all:
            self._kept = Kept(len(self.packing), np.zeros(0, np.int64))

    @property
    def left_out(self) -> int:
        """Number of samples that are left out because they predict nothing."""
        return self._kept.left_out

    def __len__(self) -> int:
        return len(self._kept)

    def epoch(self, index: int) -> int:
        """Return the epoch of a sample, counted from 0."""
        return self._order.locate(index)[0]

    def window(self, index: int) -> int:
        """Return the number of the packed sample that sample `index` of the run reads."""
        return self._order.locate(index)[1][0][0]

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of each piece that sample `index` reads."""
        at = self._pieces(index)
        starts, lengths = self.packing.starts[at], self.packing.lengths[at]
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))

    def _pieces(self, index: int) -> slice:
        number = self.window(index)
        return slice(*self.packing.first_pieces[number : number + 2].tolist())

    def __getitem__(self, index: int) -> Row:
        """Return sample `index` of the run."""
        pieces, length = self.ranges(index), self.packing.length
        lengths = np.array([count for _, count in pieces], np.int64)
        if self.packing.pairs is not None:
            text = np.zeros(int(lengths.sum()), np.int64)
            if self._reads:
                text = np.concatenate([self._stream.read(*piece) for piece in pieces])
            numbers = self.packing.pairs[self._pieces(index), 0]
            return Row(text, lengths, False, tuple(numbers.tolist()))
        first, count = pieces[0]
        # only a document that is longer than a sample fills one and continues
        after = first + length  # it continues if the split goes on there, and no document begins
        is_longer = count == length and after < len(self._stream)
        continues = is_longer and len(self._stream.documents_within(after, 1)) != 1
        tokens = np.full(length + 1, PAD, np.int64)
        if self._reads:
            read = [(first, length + 1)] if continues else pieces
            text = np.concatenate([self._stream.read(*piece) for piece in read])
            tokens[: len(text)] = text
        return Row(tokens, lengths, continues)
