"""Micro-batches: the token ids of some samples, laid out for a model."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import xxhash


@dataclass(frozen=True)
class Batch:
    """Token ids of the samples of a micro-batch of a decoder-only model.

    Attributes:
        tokens: [b, s] int64, input of the model.
        labels: [b, s] int64, the next token at each position.
        positions: [b, s] int64, 0..s-1.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Number of tokens per sample whose activations are sent between pipeline stages."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.positions.to(device))

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a GPT's forward pass, by name."""
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "attention_mask": None,
        }

    def mean_loss(self, loss_bs: torch.Tensor) -> torch.Tensor:
        """Average [b, s] losses over tokens to [] fp32."""
        return loss_bs.float().mean()


@dataclass(frozen=True)
class Seq2SeqBatch:
    """Token ids of the samples of a micro-batch of an encoder-decoder.

    The lengths are those of geometry/lengths.py. `s_dec` includes padding after the targets, so
    that tensor ranks can divide it; padding has no weight in the loss.

    Attributes:
        encoder_tokens: [b, s_enc] int64, input of the encoder.
        encoder_mask: [b, s_enc] bool, false for padding; None if no sample has padding. Each sample
            has at least one token.
        decoder_tokens: [b, s_dec] int64, input of the decoder: the labels shifted right by one.
        labels: [b, s_dec] int64, the token to predict at each position.
        loss_mask: [b, s_dec] fp32, the weight of each label; 0 for padding.
    """

    encoder_tokens: torch.Tensor
    encoder_mask: torch.Tensor | None
    decoder_tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.encoder_tokens.shape[0]

    @property
    def length(self) -> int:
        """Number of tokens per sample, of encoder and decoder, that pipeline stages exchange."""
        return self.encoder_tokens.shape[1] + self.decoder_tokens.shape[1]

    def to(self, device: torch.device) -> "Seq2SeqBatch":
        """Copy to a device."""
        mask = self.encoder_mask
        return replace(
            self,
            encoder_tokens=self.encoder_tokens.to(device),
            encoder_mask=None if mask is None else mask.to(device),
            decoder_tokens=self.decoder_tokens.to(device),
            labels=self.labels.to(device),
            loss_mask=self.loss_mask.to(device),
        )

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of an encoder-decoder's forward pass, by name."""
        return {
            "encoder_tokens": self.encoder_tokens,
            "encoder_mask": self.encoder_mask,
            "decoder_tokens": self.decoder_tokens,
        }

    def mean_loss(self, loss_bs: torch.Tensor) -> torch.Tensor:
        """Average [b, s_dec] losses to [] fp32: over each sample's mask, then over samples.

        A sample's weight then depends on no other sample, and the gradient does not depend on how
        samples are distributed over micro-batches and replicas.
        """
        weights = self.loss_mask.sum(dim=1).clamp(min=1)
        return ((loss_bs.float() * self.loss_mask).sum(dim=1) / weights).mean()


AnyBatch = Batch | Seq2SeqBatch
"""A micro-batch of either kind of model."""


def digest(batches: Iterable[Any]) -> int:
    """Return the sum of the xxh32 digests of all samples of some batches.

    The sum does not depend on how samples are distributed over batches and ranks. Ranks add such
    sums in fp64, which is exact for up to 2^21 samples.

    Args:
        batches: dataclasses of [b, ...] tensors on the host.
    """
    total = 0
    for batch in batches:
        tensors = [getattr(batch, field.name) for field in fields(batch)]
        arrays = [t.numpy() for t in tensors if isinstance(t, torch.Tensor)]
        for index in range(batch.samples):
            hashed = xxhash.xxh32()
            for array in arrays:
                hashed.update(array[index].tobytes())
            total += hashed.intdigest()
    return total
