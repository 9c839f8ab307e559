"""Divide documents into texts of an encoder-decoder, and put these into samples.

The length of a text and its denoiser decide how many tokens each side reads. A sample is limited on
both sides. Samples are filled one after another. The first text of a sample is the largest one, by
the sum of its shares of the two limits; then comes the text that fits and leaves the least

    free share of one side + free share of the other + weight * difference of the two

so that no side fills up while the other is empty. The shares of a side that all texts together need
less of count less. Which weight is best depends on the texts: of some weights, the one with the
fewest samples is used.

The heuristic fills bins in two dimensions: Panigrahy et al., Heuristics for Vector Bin Packing
(Microsoft Research, 2011), compare others. Texts are placed in blocks of consecutive ones, so that
the time is proportional to their number.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frontier_llm.config.data import DataConfig
from frontier_llm.config.denoisers import Denoiser, divided
from frontier_llm.data.permutation import make_key, random_uint64

Numbers = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
BLOCK = 1 << 12
"""Texts that are placed together."""
_WEIGHTS = (1, 3)
"""How much the difference of the free shares of both sides counts."""


@dataclass(frozen=True)
class Pairs:
    """How documents become pairs of inputs and targets."""

    denoisers: tuple[Denoiser, ...]
    text: int
    """Tokens of a text at most."""
    inputs: int
    """Tokens of a sample that the encoder reads at most."""
    targets: int
    """Tokens of a sample that the decoder predicts at most."""

    @classmethod
    def of(cls, data: DataConfig) -> "Pairs | None":
        """Return how the documents are divided; None for a GPT."""
        if data.objective != "spans":
            return None
        return cls(data.denoisers, data.parts.text, data.sequence_length, data.decoder_tokens)

    @property
    def name(self) -> str:
        """Limits, and a digest of all that changes the samples."""
        digest = hashlib.sha256(repr((self, _WEIGHTS)).encode()).hexdigest()[:8]
        return f"{self.inputs}_{self.targets}_{digest}"

    def cut(self, documents: Numbers) -> tuple[Numbers, Numbers]:
        """Cut documents, without their ends, into equal texts; return their starts and lengths.

        A text of one token cannot be divided, and is left out.
        """
        starts, sizes = np.cumsum(documents) - documents, documents - 1
        counts = -(-sizes // self.text)
        document = np.repeat(np.arange(len(documents)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        first, after = (sizes[document] * at // counts[document] for at in (number, number + 1))
        kept = after - first > 1
        return (starts[document] + first)[kept], (after - first)[kept]

    def divide(self, lengths: Numbers) -> npt.NDArray[np.int32]:
        """Draw the denoiser of each text; return it, the inputs and the targets: [texts, 3]."""
        draws = random_uint64(len(lengths), make_key("denoisers")).astype(float) / 2**64
        shares = np.cumsum([denoiser.weight for denoiser in self.denoisers])
        drawn = np.searchsorted(shares[:-1], draws * shares[-1], side="right")
        found = np.unique(np.stack([drawn, lengths], axis=1), axis=0, return_inverse=True)
        parts = [divided(text, self.denoisers[number]) for number, text in found[0].tolist()]
        sizes = np.array([(p.inputs, p.targets) for p in parts], np.int32).reshape(-1, 2)
        return np.column_stack([drawn.astype(np.int32), sizes[found[1].ravel()]])

    def place(
        self, sizes: npt.NDArray[np.int32], report: Callable[[float], None] = lambda share: None
    ) -> Numbers:
        """Return the sample of each text, for its inputs and targets, [texts, 2].

        `report` is called with the share of the texts that have a sample.
        """
        sample_of, samples = np.empty(len(sizes), np.int64), 0
        for start in range(0, len(sizes), BLOCK):
            block = slice(start, start + BLOCK)
            sample_of[block] = samples + self._place_block(sizes[block])
            samples = int(sample_of[block].max()) + 1
            report(min(1, (start + BLOCK) / len(sizes)))
        return sample_of

    def _place_block(self, sizes: npt.NDArray[np.int32]) -> Numbers:
        shares = sizes / (self.inputs, self.targets)
        needed = shares.sum(0)
        order = np.argsort(-shares.sum(1), kind="stable")
        scales = needed / needed.max() / (self.inputs, self.targets)
        placed = [self._fill(sizes[order], scales, weight) for weight in _WEIGHTS]
        sample_of = np.empty(len(sizes), np.int64)
        sample_of[order] = min(placed, key=np.max)
        return sample_of

    def _fill(self, sizes: npt.NDArray[np.int32], scales: Shares, weight: int) -> Numbers:
        """Return the sample of each text, the largest first."""
        inputs, targets = np.ascontiguousarray(sizes.T)
        texts, sample_of, sample = np.arange(len(sizes)), np.empty(len(sizes), np.int64), 0
        while len(texts):
            chosen, free_inputs, free_targets = 0, self.inputs, self.targets
            while True:
                sample_of[texts[chosen]] = sample
                free_inputs -= inputs[chosen]
                free_targets -= targets[chosen]
                texts, inputs, targets = (np.delete(of, chosen) for of in (texts, inputs, targets))
                fitting = np.flatnonzero((inputs <= free_inputs) & (targets <= free_targets))
                if not len(fitting):
                    break
                one = (free_inputs - inputs[fitting]) * scales[0]
                other = (free_targets - targets[fitting]) * scales[1]
                chosen = fitting[(one + other + weight * np.abs(one - other)).argmin()]
            sample += 1
        return sample_of
