"""Span corruption: the encoder reads text with spans removed, the decoder predicts the spans.

    text      The quick brown fox jumps over the lazy dog
    inputs    The quick <0> jumps over <1> dog </s>
    targets   <0> brown fox <1> the lazy </s>

15% of the tokens are removed, in spans of 3 tokens on average, and each span is replaced by a
different sentinel. All samples have the same lengths (geometry/lengths.py). The choice of spans is
a pure function of (key, sample index), so it needs no random state. Sentinels count down from the
end of the vocabulary.

Paper: T5, arXiv:1910.10683, section 3.1.4; mT5, arXiv:2010.11934, section 3. A text always begins
with kept tokens and ends with a span, as in the authors' code of T5.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.data.batch import Seq2SeqBatch
from frontier_llm.data.permutation import make_key, random_uint64
from frontier_llm.geometry.lengths import corrupted

Tokens = npt.NDArray[np.int64]
START = 0
"""First token that the decoder reads, and the padding token."""


class SpanCorruption:
    """Builds micro-batches of an encoder-decoder from windows of text."""

    def __init__(self, text_tokens: int, inputs: int, sentinel: int, eos: int, key: int) -> None:
        """Initialise the lengths and the key.

        Args:
            text_tokens: number of tokens of a window.
            inputs: number of tokens that the encoder reads, at least as many as corruption leaves.
            sentinel: token id of the first sentinel; the others count down from it.
            eos: token id that ends inputs and targets.
            key: 64 bits, derived from the corpus and the seed.
        """
        self._lengths = corrupted(text_tokens)
        self._spans = self._lengths.inputs + self._lengths.targets - text_tokens - 2 >> 1
        self._noise = self._lengths.targets - self._spans - 1
        assert self._spans >= 1, "checked in config/rules.py"
        self._inputs, self._sentinel, self._eos, self._key = inputs, sentinel, eos, key

    def corrupt(self, text: Tokens, index: int) -> tuple[Tokens, Tokens]:
        """Move spans from a text to the targets.

        Args:
            text: [text_tokens] int64.
            index: index of the sample.

        Returns:
            Inputs and targets, both int64 and ending with `eos`.
        """
        taken = self._draw(len(text), make_key(self._key, index))
        after_taken = np.concatenate([[False], taken[:-1]])
        first_taken = taken & ~after_taken
        last_kept = np.concatenate([first_taken[1:], [False]])
        sentinels = self._sentinel - np.arange(self._spans)
        inputs, targets = text.copy(), text.copy()
        inputs[first_taken] = sentinels
        targets[last_kept] = sentinels  # there is room: a kept token precedes each span
        return (
            np.append(inputs[~taken | first_taken], self._eos),
            np.append(targets[taken | last_kept], self._eos),
        )

    def batch(self, rows: Sequence[Tokens], indices: Sequence[int]) -> Seq2SeqBatch:
        """Corrupt windows and return them as a micro-batch.

        Args:
            rows: windows, [text_tokens] int64 each.
            indices: indices of the samples.
        """
        pairs = [self.corrupt(row, index) for row, index in zip(rows, indices, strict=True)]
        inputs = _padded([inputs for inputs, _ in pairs], self._inputs)
        multiple = DECODER_MULTIPLE
        length = -(-self._lengths.targets // multiple) * multiple
        labels = _padded([targets for _, targets in pairs], length)
        read = torch.cat([labels.new_full((len(rows), 1), START), labels[:, :-1]], dim=1)
        weights = torch.zeros(labels.shape, dtype=torch.float32)
        weights[:, : self._lengths.targets] = 1
        # after the targets the decoder reads only padding, as its labels are padding there
        read[:, self._lengths.targets :] = START
        mask = None
        if self._lengths.inputs < self._inputs:
            mask = torch.zeros(inputs.shape, dtype=torch.bool)
            mask[:, : self._lengths.inputs] = True
        return Seq2SeqBatch(inputs, mask, read, labels, weights)

    def _draw(self, tokens: int, key: int) -> npt.NDArray[np.bool_]:
        """Choose the tokens to remove: [tokens] bool, kept stretches and spans alternating."""
        kept = _segments(tokens - self._noise, self._spans, make_key(key, "kept"))
        spans = _segments(self._noise, self._spans, make_key(key, "taken"))
        lengths = np.stack([kept, spans], axis=1).ravel()
        return np.repeat(np.tile([False, True], self._spans), lengths)


def restore(inputs: Sequence[int], targets: Sequence[int], sentinel: int, eos: int) -> list[int]:
    """Return the original text: inputs with each sentinel replaced by its span of the targets."""
    spans: dict[int, list[int]] = {}
    last: list[int] = []
    expected = sentinel
    for token in targets[:-1]:
        if token == expected:
            last = spans[token] = []
            expected -= 1
        else:
            last.append(token)
    assert inputs[-1] == targets[-1] == eos, "inputs and targets end with eos"
    text: list[int] = []
    for token in inputs[:-1]:
        text += spans.get(token, [token])
    return text


def _segments(total: int, count: int, key: int) -> npt.NDArray[np.int64]:
    """Divide a length into `count` lengths of at least 1, uniformly at random: [count] int64."""
    borders = np.sort(np.argsort(random_uint64(total - 1, key), kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


def _padded(rows: Sequence[Tokens], length: int) -> torch.Tensor:
    """Stack rows of equal length, padded at the end: [rows, length] int64."""
    stacked = torch.full((len(rows), length), START, dtype=torch.int64)
    stacked[:, : len(rows[0])] = torch.from_numpy(np.stack(rows))
    return stacked
