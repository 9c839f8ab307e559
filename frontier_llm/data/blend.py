"""Which corpus each sample of a blend comes from, in closed form.

Samples are dealt out in blocks of BLOCK. In each, corpus c gets a fixed number q_c in proportion to
its weight; its k-th sample of the block stands at (k + u) / q_c for a u in [0, 1) drawn for it,
and all corpora together are sorted by that. So any stretch has nearly the shares that were asked
for, each corpus is read in its own order without a gap, and nothing is stored but the weights.

When weights change at a sample, a new *segment* begins there: what each corpus has given so far is
counted from the segments before, so nothing is lost and nothing is read again. The segments are
all that a checkpoint must keep.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from frontier_llm.data.permutation import make_key, scatter
from frontier_llm.errors import ConfigError

BLOCK = 1 << 14


@dataclass(frozen=True)
class Segment:
    """A stretch of samples under the same weights."""

    first_sample: int
    weights: Mapping[str, float]
    """By name of corpus; their sum is 1."""


def weigh(
    tokens: Mapping[str, int], weights: Mapping[str, float | None], alpha: float
) -> dict[str, float]:
    """Return the share of each corpus.

    Args:
        tokens: of each corpus, by its name.
        weights: as configured; None where the sizes decide.
        alpha: power of the sizes: p ~ tokens^alpha.

    Raises:
        ConfigError: some corpora have a weight and others none, or one is too small.

    Paper: mT5, arXiv:2010.11934, section 3.2 (alpha = 0.3).
    """
    given = [weight for weight in weights.values() if weight is not None]
    if given and len(given) < len(weights):
        without = ", ".join(name for name, weight in weights.items() if weight is None)
        raise ConfigError(
            "data.corpora",
            f"no weight for {without}",
            "a weight for every corpus, or for none",
            "add it, or remove all weights: data.blend_alpha decides then",
        )
    raw = {name: weights[name] or float(count) ** alpha for name, count in tokens.items()}
    total = sum(raw.values())
    shares = {name: value / total for name, value in raw.items()}
    smallest = min(shares, key=lambda name: shares[name])
    if shares[smallest] * BLOCK < 1:
        raise ConfigError(
            "data.corpora",
            f"{smallest} with {shares[smallest]:.2g} of all samples",
            f"at least one sample in {BLOCK}",
            "raise its weight, or leave it out",
        )
    return shares


class Schedule:
    """The corpus of each sample, and which of that corpus's samples it is. Threads may share it."""

    def __init__(self, segments: Sequence[Segment], key: int) -> None:
        """Take up a history of weights.

        Args:
            segments: the first from sample 0 on, in order, each corpus named in all.
            key: 64 bits, of the seed.
        """
        assert segments[0].first_sample == 0, "the first segment begins at sample 0"
        self.segments = tuple(segments)
        self.names = tuple(segments[0].weights)
        self._key = key
        self._quotas = [_quotas([s.weights[name] for name in self.names]) for s in segments]
        self._block = lru_cache(maxsize=4)(self._make_block)
        self._given = [np.zeros(len(self.names), dtype=np.int64)]
        for number, (segment, following) in enumerate(pairwise(segments)):
            length = following.first_sample - segment.first_sample
            self._given.append(self._given[-1] + self._count(number, length))

    @classmethod
    def starting(cls, weights: Mapping[str, float], key: int) -> "Schedule":
        """Begin a run."""
        return cls([Segment(0, dict(weights))], key)

    def changed(self, next_sample: int, weights: Mapping[str, float]) -> "Schedule":
        """Go on with other weights from a sample on; those before it stay as they were.

        Args:
            next_sample: not before the last segment.
            weights: of the same corpora.

        Raises:
            ConfigError: the corpora are others.
        """
        if set(weights) != set(self.names):
            raise ConfigError(
                "data.corpora",
                ", ".join(sorted(weights)),
                f"the corpora that the run has begun with: {', '.join(sorted(self.names))}",
                "give one that is to be left out a small weight; a new one wants a new run",
            )
        kept = [segment for segment in self.segments if segment.first_sample < next_sample]
        if kept and dict(kept[-1].weights) == dict(weights):
            return Schedule(kept, self._key)
        return Schedule([*kept, Segment(next_sample, dict(weights))], self._key)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (number of the corpus in `names`, index of its own sample) of a sample."""
        starts = [segment.first_sample for segment in self.segments]
        number = bisect_right(starts, index) - 1
        block, place = divmod(index - starts[number], BLOCK)
        corpora, ranks = self._block(number, block)
        corpus = int(corpora[place])
        before = int(self._given[number][corpus]) + block * int(self._quotas[number][corpus])
        return corpus, before + int(ranks[place])

    def to_meta(self) -> list[dict[str, Any]]:
        """Return what a checkpoint keeps of it: plain JSON."""
        return [{"first_sample": s.first_sample, "weights": dict(s.weights)} for s in self.segments]

    def with_history(self, meta: Sequence[Mapping[str, Any]]) -> "Schedule":
        """Take up what `to_meta` returned, under the same seed."""
        return Schedule([Segment(s["first_sample"], s["weights"]) for s in meta], self._key)

    def _count(self, number: int, length: int) -> npt.NDArray[np.int64]:
        """Count the samples of each corpus among the first `length` of a segment."""
        blocks, rest = divmod(length, BLOCK)
        corpora, _ = self._block(number, blocks)
        partial = np.bincount(corpora[:rest], minlength=len(self.names))
        return blocks * self._quotas[number] + partial

    def _make_block(
        self, number: int, block: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpus of each place of a block, and how many of it stand before."""
        quotas = self._quotas[number]
        corpora = np.repeat(np.arange(len(quotas)), quotas)
        ranks = np.concatenate([np.arange(quota) for quota in quotas])
        drawn = scatter(BLOCK, make_key(self._key, number, block)) / 2.0**64
        order = np.argsort((ranks + drawn) / quotas[corpora], kind="stable")
        return corpora[order], ranks[order]


def _quotas(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Share BLOCK out by weights, at least 1 each: the largest remainders are rounded up."""
    exact = np.asarray(weights, dtype=np.float64) * BLOCK / sum(weights)
    quotas = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := BLOCK - int(quotas.sum())) != 0:
        step = 1 if missing > 0 else -1
        candidates = np.where((quotas > 1) | (step > 0), step * (exact - quotas), -np.inf)
        quotas[int(np.argmax(candidates))] += step
    return quotas
