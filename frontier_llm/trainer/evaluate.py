"""Computes the validation loss: the loss on text with which the model is not trained."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import LossMean
from frontier_llm.data.corpora import Corpora
from frontier_llm.data.loader import BatchLoader
from frontier_llm.data.validation_windows import ValidationWindows
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.pipeline import Pipeline


@dataclass(frozen=True)
class LossSums:
    """Sums over samples of one corpus, from the `loss_sums` of its batches."""

    samples: float = 0.0
    """Number of samples that predict a token."""
    means: float = 0.0
    """Sum over samples of their mean losses, in nats per token."""
    nats: float = 0.0
    """Sum of the losses of all predicted tokens."""
    tokens: float = 0.0
    """Number of predicted tokens."""
    text_nats: float = 0.0
    """`nats` without the tokens that end documents."""
    text_tokens: float = 0.0
    """`tokens` without the tokens that end documents."""

    @classmethod
    def addends(cls, rows: torch.Tensor) -> torch.Tensor:
        """Return the fields for each sample, [b, 6], from its `loss_sums`, [b, 4]."""
        nats, tokens = rows[:, 0], rows[:, 1]
        counts = torch.stack([(tokens > 0).to(nats), nats / tokens.clamp(min=1)], dim=1)
        return torch.cat([counts, rows], dim=1)

    def plus(self, rows: torch.Tensor) -> "LossSums":
        """Add the samples of a batch."""
        added = self.addends(rows).sum(0).tolist()
        return LossSums(*(x + y for x, y in zip(astuple(self), added, strict=True)))

    def loss(self, by: LossMean) -> float:
        """Return the mean loss in nats per token (`data.loss_mean`)."""
        return self.means / self.samples if by == "samples" else self.nats / self.tokens


class TextLoss(NamedTuple):
    """The loss on a text, for `bits_per_byte`."""

    sums: LossSums
    bytes_per_token: float
    """Mean length in UTF-8 of the tokens of the text, without those that end documents."""
    share: float = 1.0
    """Share of the text in a mixture of several texts, in tokens."""


def bits_per_byte(texts: Sequence[TextLoss]) -> float | None:
    """Return the negative log-likelihood of texts in bits per byte of UTF-8.

    It is the sum over all predicted tokens of text, divided by the bytes that these tokens stand
    for: their number, multiplied by the mean length of a token of the text. A token that ends a
    document stands for no byte and is left out, in the sum and in the number. So are tokens that
    are not predicted. A mixture of texts has its shares of both. None if no token is predicted.
    """
    if not all(text.sums.text_tokens and text.bytes_per_token for text in texts):
        return None
    nats = sum(text.share * text.sums.text_nats / text.sums.text_tokens for text in texts)
    return nats / sum(text.share * text.bytes_per_token for text in texts) / math.log(2)


@dataclass(frozen=True)
class Validation:
    """The result of an evaluation, the same on all ranks."""

    loss: float
    """Mean loss in nats per token (`data.loss_mean`); of a blend, weighted by the shares of its
    corpora."""
    bits_per_byte: float | None
    """None for span corruption, which does not predict every token."""
    samples: int
    """Number of samples that were read, each of them once."""


def summarize(
    config: RunConfig, corpora: Corpora, by_corpus: Sequence[LossSums]
) -> tuple[Validation, list[Validation]]:
    """Return the result on all corpora, and on each of them."""
    splits = [corpus.manifest.validation for corpus in corpora.corpora]
    texts = [
        TextLoss(sums, split.text_bytes_per_token, corpora.weights[name])
        for sums, split, name in zip(by_corpus, splits, corpora.names, strict=True)
    ]

    def of(some: Sequence[TextLoss]) -> Validation:
        loss = sum(text.share * text.sums.loss(config.data.loss_mean) for text in some)
        bits = None if config.data.objective == "spans" else bits_per_byte(some)
        return Validation(loss, bits, round(sum(text.sums.samples for text in some)))

    return of(texts), [of([text._replace(share=1.0)]) for text in texts]


class Evaluation:
    """Computes the loss on the first validation samples, which are the same each time."""

    def __init__(
        self,
        model: Model,
        groups: Groups,
        config: RunConfig,
        loader: BatchLoader,
        corpora: Corpora,
        windows: ValidationWindows,
    ) -> None:
        """Initialise.

        Args:
            model: model chunks of this rank.
            groups: process groups of this rank.
            config: configuration of the run.
            loader: reads `windows` on this replica.
            corpora: corpora of the run.
            windows: the validation samples.
        """
        self._model, self._groups, self._loader = model, groups, loader
        self._config, self._corpora, self.windows = config, corpora, windows
        self._pipeline = Pipeline(model, groups)
        self._device = next(model.chunks[0].parameters()).device

    def run(self) -> Validation:
        """Evaluate the model. Collective over all ranks."""
        for chunk in self._model.chunks:
            chunk.eval()
        size = len(self._corpora.names), len(astuple(LossSums()))
        total = torch.zeros(size, dtype=torch.float64, device=self._device)
        end = self._corpora.tokenizer.eod
        with torch.no_grad():
            for first in range(0, len(self.windows), self._config.data.global_batch):
                found = self._pipeline.sums(self._loader.micro_batches(first), end)
                if self._groups.counts_samples:
                    total += self._by_corpus(first, found)
        for chunk in self._model.chunks:
            chunk.train()
        dist.all_reduce(total)
        by_corpus = [LossSums(*sums) for sums in total.tolist()]
        return summarize(self._config, self._corpora, by_corpus)[0]

    def _by_corpus(self, first: int, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sums of this replica's samples of a step by corpus: [corpora, 6] fp64."""
        indices = chain(*self._loader.sample_indices(first))
        corpora = torch.tensor([self.windows.corpus(index) for index in indices])
        addends = LossSums.addends(torch.cat(list(found)))
        zeros = addends.new_zeros(len(self._corpora.names), addends.shape[1])
        return zeros.index_add(0, corpora.to(addends.device), addends)
