"""Compute how many tokens span corruption gives to the encoder and to the decoder.

The spans are those of T5 (arXiv:1910.10683, section 3.1.4): 15% of the tokens are removed, in spans
of 3 tokens on average.
"""

from dataclasses import dataclass

SENTINELS = 100
"""Sentinel tokens that T5 and mT5 have, and that every vocabulary of spans has room for."""
NOISE_DENSITY = 0.15
"""Share of the tokens of a text that are removed."""
MEAN_SPAN_LENGTH = 3.0
"""Average number of tokens in a removed span."""


@dataclass(frozen=True)
class SpanLengths:
    """Tokens of one sample of span corruption.

    A sentinel is a special token that stands for a removed span. Sentinels and the token that ends
    a sequence are included in the counts.
    """

    text: int
    """Tokens of the uncorrupted text."""
    inputs: int
    """Tokens of the remaining text, with a sentinel in place of each removed span."""
    targets: int
    """Tokens of the removed spans, each after its sentinel."""

    @property
    def spans(self) -> int:
        """Removed spans. Inputs and targets have a sentinel for each, and one end token each."""
        return self.inputs + self.targets - self.text - 2 >> 1


def corrupted(text: int) -> SpanLengths:
    """Return the lengths after `text` tokens are corrupted."""
    removed = round(text * NOISE_DENSITY)
    spans = round(removed / MEAN_SPAN_LENGTH)
    # the last token of inputs and of targets marks the end of the sequence
    return SpanLengths(text, text - removed + spans + 1, removed + spans + 1)


def span_lengths(inputs: int) -> SpanLengths:
    """Return the lengths of the longest text whose corrupted form has at most `inputs` tokens.

    >>> span_lengths(512)
    SpanLengths(text=568, inputs=512, targets=114)
    """
    text = inputs
    while corrupted(text + 1).inputs <= inputs:
        text += 1
    return corrupted(text)


def sentinels_of(inputs: int) -> int:
    """Return the number of token ids that sentinels need if the encoder reads `inputs` tokens.

    >>> sentinels_of(512), sentinels_of(4096)
    (100, 227)
    """
    return max(SENTINELS, span_lengths(inputs).spans)
