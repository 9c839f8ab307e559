"""Span corruption: the encoder reads text with spans removed, the decoder predicts the spans.

    text      The quick brown fox jumps over the lazy dog
    inputs    The quick <0> jumps over <1> dog </s>
    targets   <0> brown fox <1> the lazy </s>

15% of the tokens are removed, in spans of 3 tokens on average. Each span is replaced by a sentinel
(written <0> and <1> above), a special token that occurs once per text. All samples have the same
lengths (config/span_lengths.py). The choice of spans depends only on a key and the index of the
sample, so a checkpoint need not store any random state.

Paper: T5, arXiv:1910.10683, section 3.1.4; mT5, arXiv:2010.11934, section 3. As in the code of the
authors of T5, a text always begins with kept tokens and ends with a removed span.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.config.span_lengths import corrupted
from frontier_llm.data.batch import Seq2SeqBatch
from frontier_llm.data.permutation import make_key, random_uint64

Tokens = npt.NDArray[np.int64]
START = 0
"""Token id that starts the decoder's input, and that pads all tensors of tokens, as in T5."""


class SpanCorruption:
    """Builds micro-batches of an encoder-decoder from windows of text.

    The encoder reads `inputs` tokens per sample. If corruption leaves fewer, the rest is padding.
    `sentinels` has at least one token id per span.
    """

    def __init__(
        self, text_tokens: int, inputs: int, sentinels: Sequence[int], eos: int, key: int
    ) -> None:
        self._lengths = corrupted(text_tokens)
        self._spans = self._lengths.spans
        self._removed_tokens = self._lengths.targets - self._spans - 1
        assert self._spans >= 1, "checked in config/rules.py"
        assert len(sentinels) >= self._spans, "see Tokenizer.sentinels"
        self._inputs, self._eos, self._key = inputs, eos, key
        self._sentinels = np.array(sentinels[: self._spans], dtype=np.int64)

    def corrupt(self, text: Tokens, index: int) -> tuple[Tokens, Tokens]:
        """Divide a text into the inputs of the encoder and the targets of the decoder.

        The text is [text_tokens] int64. The results are int64 and end with `eos`.
        """
        removed = self._draw(len(text), make_key(self._key, index))
        follows_removed = np.concatenate([[False], removed[:-1]])
        first_of_span = removed & ~follows_removed
        before_span = np.concatenate([first_of_span[1:], [False]])
        # In the inputs a sentinel takes the place of a span's first token. In the targets it takes
        # the place of the kept token before the span; there always is one.
        inputs, targets = text.copy(), text.copy()
        inputs[first_of_span] = self._sentinels
        targets[before_span] = self._sentinels
        return (
            np.append(inputs[~removed | first_of_span], self._eos),
            np.append(targets[removed | before_span], self._eos),
        )

    def batch(self, rows: Sequence[Tokens], indices: Sequence[int]) -> Seq2SeqBatch:
        """Corrupt windows of text, [text_tokens] int64 each, and return them as a micro-batch."""
        pairs = [self.corrupt(row, index) for row, index in zip(rows, indices, strict=True)]
        inputs = _stack_padded([inputs for inputs, _ in pairs], self._inputs)
        multiple = DECODER_MULTIPLE
        length = -(-self._lengths.targets // multiple) * multiple
        labels = _stack_padded([targets for _, targets in pairs], length)
        # the decoder reads the labels shifted right by one, and padding where a label is padding
        start = labels.new_full((len(rows), 1), START)
        decoder_tokens = torch.cat([start, labels[:, :-1]], dim=1)
        decoder_tokens[:, self._lengths.targets :] = START
        loss_mask = torch.zeros(labels.shape, dtype=torch.float32)
        loss_mask[:, : self._lengths.targets] = 1
        encoder_mask = None
        if self._lengths.inputs < self._inputs:
            encoder_mask = torch.zeros(inputs.shape, dtype=torch.bool)
            encoder_mask[:, : self._lengths.inputs] = True
        return Seq2SeqBatch(inputs, encoder_mask, decoder_tokens, labels, loss_mask)

    def _draw(self, tokens: int, key: int) -> npt.NDArray[np.bool_]:
        """Choose the tokens to remove: [tokens] bool.

        The text alternates between stretches of kept tokens and removed spans.
        """
        kept = _divide(tokens - self._removed_tokens, self._spans, make_key(key, "kept"))
        spans = _divide(self._removed_tokens, self._spans, make_key(key, "taken"))
        lengths = np.stack([kept, spans], axis=1).ravel()
        return np.repeat(np.tile([False, True], self._spans), lengths)


def restore(
    inputs: Sequence[int], targets: Sequence[int], sentinels: Sequence[int], eos: int
) -> list[int]:
    """Return the original text: the inputs with the span of each sentinel put back in its place."""
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    marks = set(sentinels)
    for token in targets[:-1]:
        if token in marks:
            span = spans[token] = []
        else:
            span.append(token)
    assert inputs[-1] == targets[-1] == eos, "inputs and targets end with eos"
    text: list[int] = []
    for token in inputs[:-1]:
        text += spans.get(token, [token])
    return text


def _divide(total: int, count: int, key: int) -> npt.NDArray[np.int64]:
    """Divide a length into `count` lengths of at least 1; all divisions are equally likely."""
    borders = np.sort(np.argsort(random_uint64(total - 1, key), kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


def _stack_padded(rows: Sequence[Tokens], length: int) -> torch.Tensor:
    """Stack rows of equal length, padded at the end: [rows, length] int64."""
    stacked = torch.full((len(rows), length), START, dtype=torch.int64)
    stacked[:, : len(rows[0])] = torch.from_numpy(np.stack(rows))
    return stacked
