"""Compute the number of tokens per sample on the encoder and on the decoder.

A GPT has only a decoder. In an encoder-decoder model, the encoder reads `data.sequence_length`
tokens of corrupted text, and the decoder predicts the removed spans. The spans are those of T5
(arXiv:1910.10683, section 3.1.4): 15% of the tokens are removed, in spans of 3 tokens on average.
"""

from dataclasses import dataclass

from frontier_llm.config.model import DECODER_MULTIPLE, ModelConfig

NOISE_DENSITY = 0.15
"""Share of the tokens of a text that are removed."""
MEAN_SPAN_LENGTH = 3.0
"""Average number of tokens in a removed span."""


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of one sample."""

    encoder: int
    """Tokens that the encoder reads; 0 for a GPT."""
    decoder: int
    """Tokens that the decoder computes, padding included."""

    @property
    def total(self) -> int:
        """Tokens whose activations are sent from stage to stage."""
        return self.encoder + self.decoder


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


def sample_lengths(model: ModelConfig, sequence_length: int) -> SampleLengths:
    """Return the lengths of a model's samples for `data.sequence_length`."""
    if not model.encoder_layers:
        return SampleLengths(0, sequence_length)
    targets = span_lengths(sequence_length).targets
    return SampleLengths(sequence_length, -(-targets // DECODER_MULTIPLE) * DECODER_MULTIPLE)
