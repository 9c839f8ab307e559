"""Span corruption: text with holes for the encoder, what was in them for the decoder.

    text      The quick brown fox jumps over the lazy dog
    inputs    The quick <0> jumps over <1> dog </s>
    targets   <0> brown fox <1> the lazy </s>

15% of the tokens are taken out, in spans of 3 on average, each replaced by a sentinel of its own;
the lengths of all samples are the same (geometry/lengths.py). Which spans is a pure function of
(key, sample index), so no run draws random numbers for it. Sentinels are counted down from the end
of the vocabulary.

Paper: T5, arXiv:1910.10683, section 3.1.4; mT5, arXiv:2010.11934, section 3. Text always begins
with what stays, and ends with a span, as in T5's own code.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.data.batch import Seq2SeqBatch
from frontier_llm.data.permutation import make_key, scatter
from frontier_llm.geometry.lengths import corrupted

Tokens = npt.NDArray[np.int64]
START = 0
"""What the decoder reads first, and what pads."""


class SpanCorruption:
    """Makes batches of an encoder-decoder from windows of text."""

    def __init__(self, text_tokens: int, inputs: int, sentinel: int, eos: int, key: int) -> None:
        """Fix the lengths.

        Args:
            text_tokens: of a window.
            inputs: tokens that the encoder reads: at least as many as corruption leaves.
            sentinel: the first; the next ones are counted down from it.
            eos: the token that ends inputs and targets.
            key: 64 bits, of the corpus and the seed.
        """
        self._lengths = corrupted(text_tokens)
        self._spans = self._lengths.inputs + self._lengths.targets - text_tokens - 2 >> 1
        self._noise = self._lengths.targets - self._spans - 1
        assert self._spans >= 1, "checked in config/rules.py"
        self._inputs, self._sentinel, self._eos, self._key = inputs, sentinel, eos, key

    def corrupt(self, text: Tokens, index: int) -> tuple[Tokens, Tokens]:
        """Take spans out of a text.

        Args:
            text: [text_tokens] int64.
            index: of the sample.

        Returns:
            Inputs and targets, int64, both ended by `eos`.
        """
        taken = self._draw(len(text), make_key(self._key, index))
        after_taken = np.concatenate([[False], taken[:-1]])
        first_taken = taken & ~after_taken
        last_kept = np.concatenate([first_taken[1:], [False]])
        sentinels = self._sentinel - np.arange(self._spans)
        inputs, targets = text.copy(), text.copy()
        inputs[first_taken] = sentinels
        targets[last_kept] = sentinels  # a place for them: before each span stands a kept token
        return (
            np.append(inputs[~taken | first_taken], self._eos),
            np.append(targets[taken | last_kept], self._eos),
        )

    def batch(self, rows: Sequence[Tokens], indices: Sequence[int]) -> Seq2SeqBatch:
        """Corrupt windows and lay them out.

        Args:
            rows: [text_tokens] int64 each.
            indices: of the samples.
        """
        pairs = [self.corrupt(row, index) for row, index in zip(rows, indices, strict=True)]
        inputs = _padded([inputs for inputs, _ in pairs], self._inputs)
        multiple = DECODER_MULTIPLE
        length = -(-self._lengths.targets // multiple) * multiple
        labels = _padded([targets for _, targets in pairs], length)
        read = torch.cat([labels.new_full((len(rows), 1), START), labels[:, :-1]], dim=1)
        weights = torch.zeros(labels.shape, dtype=torch.float32)
        weights[:, : self._lengths.targets] = 1
        # behind the targets the decoder reads padding alone, as it says padding alone
        read[:, self._lengths.targets :] = START
        mask = None
        if self._lengths.inputs < self._inputs:
            mask = torch.zeros(inputs.shape, dtype=torch.bool)
            mask[:, : self._lengths.inputs] = True
        return Seq2SeqBatch(inputs, mask, read, labels, weights)

    def _draw(self, tokens: int, key: int) -> npt.NDArray[np.bool_]:
        """Choose which tokens are taken: [tokens] bool, kept ones and spans in turns."""
        kept = _segments(tokens - self._noise, self._spans, make_key(key, "kept"))
        spans = _segments(self._noise, self._spans, make_key(key, "taken"))
        lengths = np.stack([kept, spans], axis=1).ravel()
        return np.repeat(np.tile([False, True], self._spans), lengths)


def restore(inputs: Sequence[int], targets: Sequence[int], sentinel: int, eos: int) -> list[int]:
    """Fill the sentinels of inputs with the spans of targets: the text again."""
    spans: dict[int, list[int]] = {}
    last: list[int] = []
    expected = sentinel
    for token in targets[:-1]:
        if token == expected:
            last = spans[token] = []
            expected -= 1
        else:
            last.append(token)
    assert inputs[-1] == targets[-1] == eos, "both are ended"
    text: list[int] = []
    for token in inputs[:-1]:
        text += spans.get(token, [token])
    return text


def _segments(total: int, count: int, key: int) -> npt.NDArray[np.int64]:
    """Cut a length into `count` lengths of at least 1, all ways equally likely: [count] int64."""
    borders = np.sort(np.argsort(scatter(total - 1, key), kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


def _padded(rows: Sequence[Tokens], length: int) -> torch.Tensor:
    """Stack rows of equal length, padded behind: [rows, length] int64."""
    stacked = torch.full((len(rows), length), START, dtype=torch.int64)
    stacked[:, : len(rows[0])] = torch.from_numpy(np.stack(rows))
    return stacked
