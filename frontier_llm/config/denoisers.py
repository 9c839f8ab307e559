"""Say how a text is divided between an encoder and a decoder, and how many tokens each one reads.

A denoiser either removes spans of the text, which the decoder predicts, or cuts off its end. T5
(arXiv:1910.10683, section 3.1.4) has one; UL2 (arXiv:2205.05131, section 3.1) mixes seven.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from frontier_llm.config.section import Section

SENTINELS = 100
"""Sentinel tokens that T5 and mT5 have, and that every vocabulary of spans has room for."""


class Denoiser(Section):
    """One way to divide a text."""

    rate: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens of a text that the decoder predicts."""
    span: float | None = Field(default=3.0, ge=1)
    """Mean number of tokens in a removed span. null = the end of the text is cut off: the encoder
    reads a prefix, which the decoder continues."""
    weight: float = Field(default=1.0, gt=0)
    """Relative share of the samples."""
    mode: str | None = None
    """Name of a token that the encoder reads first, so that the model knows the denoiser."""


T5 = (Denoiser(),)


@dataclass(frozen=True)
class SampleParts:
    """Tokens of one sample of an encoder-decoder.

    A sentinel is a special token that stands for a removed span. Sentinels, the token of the mode
    and the tokens that end inputs and targets are included in the counts.
    """

    text: int
    """Tokens of the text."""
    inputs: int
    """Tokens of the remaining text, with a sentinel in place of each removed span."""
    targets: int
    """Tokens that were removed, after a sentinel for each span."""
    spans: int
    """Removed spans that have a sentinel."""


def divided(text: int, denoiser: Denoiser = T5[0]) -> SampleParts:
    """Return the lengths after a text of at least 2 tokens is divided."""
    removed = min(max(round(text * denoiser.rate), 1), text - 1)
    spans = 0
    if denoiser.span is not None:  # each span follows a token that is kept
        spans = min(max(round(removed / denoiser.span), 1), text - removed)
    inputs = text - removed + spans + 1 + (denoiser.mode is not None)
    return SampleParts(text, inputs, removed + spans + 1, spans)


@lru_cache
def sample_parts(
    inputs: int, denoisers: tuple[Denoiser, ...] = T5, targets: int | None = None
) -> SampleParts:
    """Return the largest lengths of samples whose encoder reads at most `inputs` tokens.

    The decoder predicts at most `targets` tokens, if they are limited. All samples have the same
    length of text: the longest that suits every denoiser; 0 if there is none.

    >>> sample_parts(512)
    SampleParts(text=568, inputs=512, targets=114, spans=28)
    """

    def fits(text: int) -> bool:
        parts = [divided(text, denoiser) for denoiser in denoisers]
        return all(p.inputs <= inputs and p.targets <= (targets or p.targets) for p in parts)

    if not fits(2):
        return SampleParts(0, 0, 0, 0)
    low, high = 2, 4  # the lengths grow with that of the text
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    parts = [divided(low, denoiser) for denoiser in denoisers]
    return SampleParts(
        low, *(max(getattr(p, name) for p in parts) for name in ("inputs", "targets", "spans"))
    )


def sentinels_of(
    inputs: int, denoisers: tuple[Denoiser, ...] = T5, targets: int | None = None
) -> int:
    """Return the number of token ids that sentinels need, for the limits of `sample_parts`.

    >>> sentinels_of(512), sentinels_of(4096)
    (100, 227)
    """
    return max(SENTINELS, sample_parts(inputs, denoisers, targets).spans)


def modes_of(denoisers: Sequence[Denoiser]) -> tuple[str, ...]:
    """Return the names of the modes, in order."""
    return tuple(dict.fromkeys(d.mode for d in denoisers if d.mode is not None))
