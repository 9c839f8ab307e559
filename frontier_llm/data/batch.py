"""Define the micro-batch that a model reads.

data/loader.py and data/denoising.py build them; trainer/pipeline.py passes them to the model.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
import xxhash

from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.parallel.context_ranks import part_numbers

LossMean = Literal["samples", "tokens"]
"""What has equal weight in the mean loss (`data.loss_mean`)."""


class LossSums(NamedTuple):
    """Sums over samples."""

    samples: float
    means: float
    """Sum of the mean losses of these samples, in nats per token."""
    nats: float
    tokens: float
    text_nats: float
    """`nats` without the tokens that end documents."""
    text_tokens: float
    """`tokens` without the tokens that end documents."""

    def loss(self, by: LossMean) -> float:
        """Return the mean loss in nats per token."""
        return {"samples": self.means / self.samples, "tokens": self.nats / self.tokens}[by]


@dataclass(frozen=True)
class Batch:
    """A micro-batch of b samples, for a decoder that reads s tokens each, and an encoder if any.

    In an encoder-decoder, s includes padding at the end, which makes it divisible by the number of
    tensor-parallel ranks (geometry/lengths.py). Losses are [b, s], one per label.

    Attributes:
        encoder_tokens: [b, s_enc] int64, input of the encoder; None for a decoder-only model.
        encoder_mask: [b, s_enc] bool, false for padding; None if no sample has padding. Each sample
            has at least one token.
        encoder_cumulative_lengths: [b, k] int32, if a sample has several texts: 0, then for each
            text the index of the token after its last input, then s_enc. Padding is one more text.
        tokens: [b, s] int64, input of the decoder; in an encoder-decoder the labels shifted right
            by one.
        labels: [b, s] int64, the token to predict at each position.
        positions: [b, s] int64, 0..s-1; if documents are separate, each document begins at 0. None
            in an encoder-decoder.
        loss_mask: [b, s] fp32, the weight of each label, 0 for padding and labels that are not
            predicted; None = all labels are predicted.
        cumulative_lengths: [b, k] int32, if documents are separate: 0, then for each document of a
            sample the index of the token after its last one. Rows with fewer documents repeat s.
            None = a sample is one document. In an encoder-decoder padding belongs to the last one.
        label_weights: [b, s] fp32, the share of each label in the mean loss of the micro-batch;
            None = it follows from the mask. Labels keep it when the samples are cut.
    """

    # in the order in which `digest` reads them
    encoder_tokens: torch.Tensor | None = field(default=None, kw_only=True)
    encoder_mask: torch.Tensor | None = field(default=None, kw_only=True)
    encoder_cumulative_lengths: torch.Tensor | None = field(default=None, kw_only=True)
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    cumulative_lengths: torch.Tensor | None = None
    label_weights: torch.Tensor | None = None

    @property
    def lengths(self) -> SampleLengths:
        """Tokens of a sample."""
        encoder = 0 if self.encoder_tokens is None else self.encoder_tokens.shape[1]
        return SampleLengths(encoder, self.tokens.shape[1])

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.labels.shape[0]

    def mean_loss(self, losses: torch.Tensor, by: LossMean = "samples") -> torch.Tensor:
        """Average losses to a scalar in fp32, which a step averages over its micro-batches.

        `samples`: the losses are averaged over the predicted labels of each sample, then over
        samples. `tokens`: their sum is divided by the number of all labels, also of those that are
        not predicted. The sum over a step of this times samples, divided by the sum of `weight`, is
        the mean loss of the step. It does not depend on how samples are distributed over
        micro-batches and replicas, and neither does its gradient. If the labels have weights, the
        result is this rank's part of the mean, which has been chosen with them.
        """
        if self.label_weights is not None:
            return (losses.float() * self.label_weights).sum()
        mask = self.loss_mask
        if mask is None:
            return losses.float().mean()
        if by == "tokens":
            return (losses.float() * mask).mean()
        predicted = mask.sum(dim=1).clamp(min=1)
        return ((losses.float() * mask).sum(dim=1) / predicted).mean()

    def weight(self, by: LossMean) -> float | torch.Tensor:
        """Return the divisor for the sum of `mean_loss` times samples: [] fp64, or a number.

        `samples`: the number of those that predict a label. `tokens`: the number of predicted
        labels per label of a sample. If labels have weights, this rank's part of the divisor.
        """
        if self.label_weights is not None:
            return self.samples * self.label_weights.sum(dtype=torch.float64)
        if self.loss_mask is None:
            return self.labels.shape[0]
        predicted = self.loss_mask.sum(dim=1, dtype=torch.float64)
        weights = {
            "samples": (predicted > 0).sum(),
            "tokens": predicted.sum() / self.labels.shape[1],
        }
        return weights[by]

    def loss_sums(self, losses: torch.Tensor, end: int) -> torch.Tensor:
        """Return the fields of `LossSums` for each sample, [b, 6] fp64; `end` ends documents."""
        ones = torch.ones_like(losses, dtype=torch.float64)
        predicted = ones if self.loss_mask is None else self.loss_mask.double()
        text = predicted * (self.labels != end)
        sums = [x.sum(-1) for w in (predicted, text) for x in (w * losses.double(), w)]
        has_label, mean = (sums[1] > 0).double(), sums[0] / sums[1].clamp(min=1)
        if self.label_weights is not None:  # this rank's parts
            weights = self.samples * self.label_weights.double()
            has_label, mean = weights.sum(1), (weights * losses.double()).sum(1)
        return torch.stack([has_label, mean, *sums], dim=1)

    def with_weights(self, by: LossMean) -> "Batch":
        """Give each label its share in `mean_loss`, so that samples can be cut into parts.

        The sum of the mean losses of the parts is that of the micro-batch, also if no label of a
        part is predicted. The same holds for `weight` and, with `samples`, for `loss_sums`.
        """
        mask = torch.ones(self.labels.shape) if self.loss_mask is None else self.loss_mask
        labels = mask.sum(dim=1, keepdim=True).clamp(min=1) if by == "samples" else mask.shape[1]
        return replace(self, label_weights=mask / labels / len(mask))

    def part(self, context: int, rank: int, by: LossMean) -> "Batch":
        """Return the tokens of one of the context ranks, with the weights of `with_weights`.

        The table of documents remains that of the whole samples.
        """
        weighted = replace(self.with_weights(by), cumulative_lengths=None)
        table = self.cumulative_lengths
        lengths = [[self.tokens.shape[1]]] if table is None else table.diff(dim=1).tolist()
        documents = [[length for length in row if length] for row in lengths]
        tokens = part_numbers(documents, context, rank).expand(self.samples, -1)
        part = map_tensors(weighted, lambda tensor: tensor.gather(1, tokens))
        return replace(part, cumulative_lengths=self.cumulative_lengths)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        return map_tensors(self, lambda tensor: tensor.to(device))

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the model's forward pass, by name."""
        return {
            "tokens": self.tokens,
            "positions": self.positions,
            "cumulative_lengths": self.cumulative_lengths,
            "encoder_tokens": self.encoder_tokens,
            "encoder_mask": self.encoder_mask,
            "encoder_cumulative_lengths": self.encoder_cumulative_lengths,
            "is_part": self.label_weights is not None,
        }


def named_tensors(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch, with the names of their fields."""
    for one in fields(batch):
        if (tensor := getattr(batch, one.name)) is not None:
            yield one.name, tensor


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a batch whose tensors are changed by a function, such as a copy to a device."""
    changed: dict[str, Any] = {name: change(tensor) for name, tensor in named_tensors(batch)}
    return replace(batch, **changed)


def without_labels(batch: Batch, count: int) -> Batch:
    """Return a copy of a batch in which the last `count` samples predict nothing."""
    mask = batch.loss_mask
    mask = torch.ones(batch.labels.shape) if mask is None else mask.clone()
    mask[len(mask) - count :] = 0
    return replace(batch, loss_mask=mask)


def digest(batches: Iterable[Batch]) -> int:
    """Return the sum of the 32-bit xxh32 digests of all samples of micro-batches on the host.

    A run logs this number per step, so that two runs can be compared sample by sample. The sum does
    not depend on how samples are distributed over batches and ranks. Ranks add their sums in fp64,
    which is exact for up to 2^21 samples (53 bits of precision less 32 bits per digest).
    """
    total = 0
    for batch in batches:
        # other tensors show the borders of documents; the width of their table depends on the batch
        arrays = [
            tensor.numpy()
            for name, tensor in named_tensors(batch)
            if not name.endswith("cumulative_lengths")
        ]
        for index in range(batch.samples):
            hashed = xxhash.xxh32()
            for array in arrays:
                hashed.update(array[index].tobytes())
            total += hashed.intdigest()
    return total
