"""Divide texts between an encoder and a decoder, by `data.denoisers`.

    text      The quick brown fox jumps over the lazy dog
    inputs    The quick <0> jumps over <1> dog </s>
    targets   <0> brown fox <1> the lazy </s>

A denoiser removes a share of the tokens, in spans of a mean length. Each span is replaced by a
sentinel (written <0> and <1> above), a special token that occurs once per text. A denoiser without
spans cuts off the end of the text, and there are no sentinels. All texts have the same length
(config/denoisers.py), unless several are packed into a sample (pair_packing.py). The choice of the
denoiser and of the spans depends only on a key and the index of the sample, so a checkpoint need
not store any random state.

Papers: T5, arXiv:1910.10683, section 3.1.4; mT5, arXiv:2010.11934, section 3; UL2,
arXiv:2205.05131, section 3.1. As in the code of the authors of T5, a text always begins with kept
tokens and ends with a removed span.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.config.denoisers import Denoiser, divided
from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.data.batch import Batch
from frontier_llm.data.document_rows import Row, border_table
from frontier_llm.data.permutation import make_key, random_uint64

Tokens = npt.NDArray[np.int64]
PADDING = 0
"""Token id that pads all tensors of tokens, as in T5."""


class Denoising:
    """Builds micro-batches of an encoder-decoder from windows of text.

    The encoder reads `inputs` tokens per sample, and the decoder predicts as many tokens as the
    longest targets have, made divisible; the rest is padding.

    Args:
        denoisers: one of them is drawn for each sample.
        text_tokens: tokens of each text; of packed texts at most.
        inputs: tokens that the encoder reads per sample.
        sentinels: at least one token id per span.
        modes: token id of each mode.
        eos: token id that ends inputs and targets.
        targets: tokens that the decoder computes per sample; None = as many as the longest targets
            have, made divisible.
    """

    def __init__(
        self,
        denoisers: Sequence[Denoiser],
        text_tokens: int,
        inputs: int,
        sentinels: Sequence[int],
        modes: Mapping[str, int],
        eos: int,
        key: int,
        targets: int | None = None,
    ) -> None:
        self._denoisers, self._inputs, self._eos, self._key = denoisers, inputs, eos, key
        longest = [divided(text_tokens, denoiser) for denoiser in denoisers]
        assert len(sentinels) >= max(parts.spans for parts in longest), "Tokenizer.sentinels"
        self._sentinels, self._modes = np.array(sentinels, dtype=np.int64), modes
        self._shares = np.cumsum([denoiser.weight for denoiser in denoisers])
        self._targets = targets or (
            -(-max(parts.targets for parts in longest) // DECODER_MULTIPLE) * DECODER_MULTIPLE
        )
        self._has_padding = any(parts.inputs < inputs for parts in longest)

    def denoiser(self, index: int) -> int:
        """Return the number of the denoiser of a sample."""
        if len(self._denoisers) == 1:
            return 0
        (drawn,) = random_uint64(1, make_key(self._key, index, "denoiser"))
        share = float(drawn) / 2**64 * self._shares[-1]
        return min(int(np.searchsorted(self._shares, share, side="right")), len(self._shares) - 1)

    def divide(self, text: Tokens, index: int) -> tuple[Tokens, Tokens]:
        """Divide a text into the inputs of the encoder and the targets of the decoder.

        The text is [text_tokens] int64. The results are int64 and end with `eos`.
        """
        return self._divided(text, self.denoiser(index), make_key(self._key, index))

    def _divided(self, text: Tokens, number: int, key: int) -> tuple[Tokens, Tokens]:
        """Divide a text by the denoiser with this number, in the places that the key chooses."""
        denoiser = self._denoisers[number]
        parts = divided(len(text), denoiser)
        if denoiser.span is None:
            border = len(text) - parts.targets + 1
            inputs, targets = text[:border], text[border:]
        else:
            inputs, targets = self._without_spans(text, parts.spans, parts.targets, key)
        before = [] if denoiser.mode is None else [self._modes[denoiser.mode]]
        ends = np.array([self._eos])
        return (
            np.concatenate([np.array(before, dtype=np.int64), inputs, ends]),
            np.concatenate([targets, ends]),
        )

    def batch(
        self, rows: Sequence[Tokens | Row], indices: Sequence[int], start: int = PADDING
    ) -> Batch:
        """Divide windows of text, [text_tokens] int64 each, and return them as a micro-batch.

        A row has several texts, which read only themselves. The decoder's input of each text starts
        with the token `start`.
        """
        pairs = [self._pairs(row, index) for row, index in zip(rows, indices, strict=True)]
        by_side = [[[pair[side] for pair in row] for row in pairs] for side in (0, 1)]
        inputs, is_input = _stack_padded(list(map(np.concatenate, by_side[0])), self._inputs)
        labels, is_label = _stack_padded(list(map(np.concatenate, by_side[1])), self._targets)
        # the decoder reads the labels of a text shifted right by one
        read = [[np.append(start, labels[:-1]) for labels in row] for row in by_side[1]]
        decoder_tokens, _ = _stack_padded(list(map(np.concatenate, read)), self._targets)
        borders: list[torch.Tensor | None] = [None, None]
        if isinstance(rows[0], Row):
            inputs_end, targets_end = (
                [np.cumsum([0, *map(len, row)]).tolist() for row in side] for side in by_side
            )
            encoder = [[*ends, self._inputs] for ends in inputs_end]
            # the padding of the decoder belongs to the last text: each query needs a key
            decoder = [[*ends[:-1], self._targets] for ends in targets_end]
            borders = [border_table(encoder, self._inputs), border_table(decoder, self._targets)]
        has_mask = self._has_padding and borders[0] is None
        return Batch(
            decoder_tokens,
            labels,
            loss_mask=is_label.float(),
            cumulative_lengths=borders[1],
            encoder_tokens=inputs,
            encoder_mask=is_input if has_mask else None,
            encoder_cumulative_lengths=borders[0],
        )

    def _pairs(self, row: Tokens | Row, index: int) -> list[tuple[Tokens, Tokens]]:
        """Return the inputs and the targets of each text of a sample."""
        if not isinstance(row, Row):
            return [self.divide(row, index)]
        texts = np.split(row.tokens, np.cumsum(row.lengths)[:-1])
        return [
            self._divided(text, number, make_key(self._key, index, place))
            for place, (text, number) in enumerate(zip(texts, row.denoisers, strict=True))
        ]

    def _without_spans(
        self, text: Tokens, spans: int, targets: int, key: int
    ) -> tuple[Tokens, Tokens]:
        """Remove spans, whose tokens and sentinels are `targets` tokens with the one at the end."""
        sentinels = self._sentinels[:spans]
        removed = _draw(len(text), targets - spans - 1, spans, key)
        follows_removed = np.concatenate([[False], removed[:-1]])
        first_of_span = removed & ~follows_removed
        before_span = np.concatenate([first_of_span[1:], [False]])
        # In the inputs a sentinel takes the place of a span's first token. In the targets it takes
        # the place of the kept token before the span; there always is one.
        kept, taken = text.copy(), text.copy()
        kept[first_of_span] = sentinels
        taken[before_span] = sentinels
        return kept[~removed | first_of_span], taken[removed | before_span]


def _draw(tokens: int, removed: int, spans: int, key: int) -> npt.NDArray[np.bool_]:
    """Choose the tokens to remove: [tokens] bool.

    The text alternates between stretches of kept tokens and removed spans.
    """
    kept = _divide(tokens - removed, spans, make_key(key, "kept"))
    taken = _divide(removed, spans, make_key(key, "taken"))
    lengths = np.stack([kept, taken], axis=1).ravel()
    return np.repeat(np.tile([False, True], spans), lengths)


def _divide(total: int, count: int, key: int) -> npt.NDArray[np.int64]:
    """Divide a length into `count` lengths of at least 1; all divisions are equally likely."""
    borders = np.sort(np.argsort(random_uint64(total - 1, key), kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


def _stack_padded(rows: Sequence[Tokens], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows, padded at the end: [rows, length] int64, and bool, false for padding."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(length) < lengths[:, None]
    stacked = np.full(is_token.shape, PADDING, dtype=np.int64)
    stacked[is_token] = np.concatenate(rows)
    return torch.from_numpy(stacked), torch.from_numpy(is_token)
