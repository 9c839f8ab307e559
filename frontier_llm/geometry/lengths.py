"""How many tokens of a sample the encoder and the decoder compute.

A GPT has no encoder. An encoder-decoder reads `data.sequence_length` tokens of corrupted text and
writes what was taken out of it: the two lengths are one another's function (T5's span corruption,
arXiv:1910.10683, section 3.1.4: 15% of the tokens, in spans of 3 on average).
"""

from dataclasses import dataclass

from frontier_llm.config.model import DECODER_MULTIPLE, ModelConfig
from frontier_llm.config.run import RunConfig

NOISE_DENSITY = 0.15
"""Share of the text's tokens that are taken out."""
MEAN_SPAN_LENGTH = 3.0
"""Tokens of a span that is taken out, on average."""


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of one sample."""

    encoder: int
    """Read by the encoder; 0 for a GPT."""
    decoder: int
    """Computed by the decoder, padding included."""

    @property
    def total(self) -> int:
        """Tokens whose activations travel from stage to stage."""
        return self.encoder + self.decoder


@dataclass(frozen=True)
class SpanLengths:
    """Tokens of one sample of span corruption, sentinels and end of sequence included."""

    text: int
    """Cut out of the corpus."""
    inputs: int
    """What remains, with a sentinel in the place of each span."""
    targets: int
    """The spans, each behind its sentinel."""


def corrupted(text: int) -> SpanLengths:
    """Return what span corruption makes of `text` tokens; both sides end with one more token."""
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
    """Return the lengths for `data.sequence_length`."""
    if not model.encoder_layers:
        return SampleLengths(0, sequence_length)
    targets = span_lengths(sequence_length).targets
    return SampleLengths(sequence_length, -(-targets // DECODER_MULTIPLE) * DECODER_MULTIPLE)


def run_lengths(config: RunConfig) -> SampleLengths:
    """Return the lengths of a run's samples."""
    return sample_lengths(config.model, config.data.sequence_length)
