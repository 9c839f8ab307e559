"""The number of tokens per sample that the encoder and the decoder compute.

A GPT has no encoder. The encoder of an encoder-decoder reads `data.sequence_length` tokens of
corrupted text, and the decoder predicts the removed spans; each length determines the other (T5's
span corruption, arXiv:1910.10683, section 3.1.4: 15% of the tokens, in spans of 3 on average).
"""

from dataclasses import dataclass

from frontier_llm.config.model import DECODER_MULTIPLE, ModelConfig

NOISE_DENSITY = 0.15
"""Share of the text's tokens that are removed."""
MEAN_SPAN_LENGTH = 3.0
"""Average tokens of a removed span."""


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of one sample."""

    encoder: int
    """Read by the encoder; 0 for a GPT."""
    decoder: int
    """Computed by the decoder, padding included."""

    @property
    def total(self) -> int:
        """Tokens whose activations are sent from stage to stage."""
        return self.encoder + self.decoder


@dataclass(frozen=True)
class SpanLengths:
    """Tokens of one sample of span corruption, sentinels and end of sequence included."""

    text: int
    """Tokens of the uncorrupted text."""
    inputs: int
    """The remaining text, with a sentinel in place of each span."""
    targets: int
    """The removed spans, each behind its sentinel."""


def corrupted(text: int) -> SpanLengths:
    """Return the lengths after corrupting `text` tokens; both sides end with one more token."""
    noise = round(text * NOISE_DENSITY)
    spans = round(noise / MEAN_SPAN_LENGTH)
    return SpanLengths(text, text - noise + spans + 1, noise + spans + 1)


def span_lengths(inputs: int) -> SpanLengths:
    """Return the longest text whose corrupted inputs are at most `inputs` tokens.

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
