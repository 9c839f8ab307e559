"""Computes the validation loss: the loss on text with which the model is not trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import LossSums
from frontier_llm.data.corpora import Corpora, ValidationWindows
from frontier_llm.data.loader import BatchLoader
from frontier_llm.model.build import Model
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.pipeline import Pipeline


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
        self._groups, self._loader = groups, loader
        self._config, self._corpora, self.windows = config, corpora, windows
        self._pipeline = Pipeline(model, groups)

    def run(self) -> Validation:
        """Evaluate the model. Collective over all ranks."""
        size = len(self._corpora.names), len(LossSums._fields)
        total = torch.zeros(size, dtype=torch.float64, device=self._pipeline.device)
        end = self._corpora.tokenizer.eod
        with self._pipeline.evaluating():
            for first in range(0, len(self.windows), self._config.data.global_batch):
                found = self._pipeline.sums(self._loader.micro_batches(first), end)
                for indices, sums in zip(self._loader.sample_indices(first), found, strict=False):
                    if self._groups.counts_losses:
                        corpora = [self.windows.corpus(index) for index in indices]
                        total.index_add_(0, torch.tensor(corpora, device=total.device), sums)
        dist.all_reduce(total)
        by_corpus = [LossSums(*sums) for sums in total.tolist()]
        return summarize(self._config, self._corpora, by_corpus)[0]
