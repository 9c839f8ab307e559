"""One micro-batch."""

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """Token ids of some samples.

    Attributes:
        tokens: [b, s] int64, what the model reads.
        labels: [b, s] int64, what it should say: the tokens one place on.
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
        """Tokens a sample whose activations travel from stage to stage."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.positions.to(device))

    def inputs(self) -> dict[str, Any]:
        """Return what a GPT's forward pass takes, by argument."""
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
    """Token ids of some samples of an encoder-decoder.

    The lengths are those of geometry/lengths.py: `s_dec` is padded behind the targets to a
    multiple, which tensor ranks can cut; what pads has no weight in the loss.

    Attributes:
        encoder_tokens: [b, s_enc] int64, what the encoder reads.
        encoder_mask: [b, s_enc] bool, true where a token is, false where it pads; None when every
            sample is packed full. Each sample has a token.
        decoder_tokens: [b, s_dec] int64, what the decoder reads: the labels one place back.
        labels: [b, s_dec] int64, what it should say.
        loss_mask: [b, s_dec] fp32, the weight of each label: 0 where it pads.
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
        """Tokens a sample whose activations travel from stage to stage: of both sides."""
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
        """Return what an encoder-decoder's forward pass takes, by argument."""
        return {
            "encoder_tokens": self.encoder_tokens,
            "encoder_mask": self.encoder_mask,
            "decoder_tokens": self.decoder_tokens,
        }

    def mean_loss(self, loss_bs: torch.Tensor) -> torch.Tensor:
        """Average [b, s_dec] losses to [] fp32: over each sample's mask, then over samples.

        So a sample's weight depends on no other sample, and the gradient not on how samples are
        dealt out to micro-batches and replicas.
        """
        weights = self.loss_mask.sum(dim=1).clamp(min=1)
        return ((loss_bs.float() * self.loss_mask).sum(dim=1) / weights).mean()


AnyBatch = Batch | Seq2SeqBatch
"""What a step reads."""
