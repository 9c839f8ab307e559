"""Divide documents into texts of an encoder-decoder, and put these into samples.

The length of a text and its denoiser decide how many tokens each side reads. A sample is limited on
both sides. Texts are placed in decreasing order of their size, the sum of their shares of the two
limits. Each goes into the sample that it leaves with the most equal free shares on both sides,
relative to all that is free, so that no side fills up while the other is empty. If a text fits into
none, a new sample begins.

The heuristic is a best fit for two dimensions: Panigrahy et al., Heuristics for Vector Bin Packing
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
BLOCK = 1 << 12
"""Texts that are placed together."""
_SMALL = 0.02
"""Free share of a sample below which it matters less that the sides are equal."""


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
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
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
        limits = np.array([self.inputs, self.targets])
        sample_of, free, count = np.empty(len(sizes), np.int64), np.tile(limits, (len(sizes), 1)), 0
        for text in np.argsort(-(sizes / limits).sum(1), kind="stable").tolist():
            left = free[:count] - sizes[text]
            fitting = np.flatnonzero((left >= 0).all(1))
            if len(fitting):
                shares = left[fitting] / limits
                unequal = np.abs(shares[:, 0] - shares[:, 1]) / (shares.sum(1) + _SMALL)
                sample = int(fitting[unequal.argmin()])
            else:
                sample, count = count, count + 1
            free[sample] -= sizes[text]
            sample_of[text] = sample
        return sample_of
