"""Compute the number of tokens per sample on the encoder and on the decoder.

A GPT has only a decoder. In an encoder-decoder model, the encoder reads `data.sequence_length`
tokens of corrupted text, and the decoder predicts the removed spans (config/denoisers.py).
"""

from dataclasses import dataclass

from frontier_llm.config.data import DataConfig
from frontier_llm.config.model import ModelConfig


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


def sample_lengths(model: ModelConfig, data: DataConfig) -> SampleLengths:
    """Return the lengths of a model's samples, padding included."""
    if not model.encoder_layers:
        return SampleLengths(0, data.sequence_length)
    return SampleLengths(data.sequence_length, data.decoder_tokens)
