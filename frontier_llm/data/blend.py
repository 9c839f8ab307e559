"""Choose the corpus that each sample of a blend comes from, in closed form.

Samples are divided into blocks of BLOCK. In each block corpus c gets a fixed number q_c of samples
in proportion to its weight. Its k-th sample of the block has the sort key (k + u) / q_c, with u in
[0, 1) drawn per sample; the block is all samples sorted by their keys. Any run of samples therefore
has nearly the requested shares, each corpus is read in its own order without gaps, and only the
weights are stored.

When the weights change at a sample, a new *segment* begins there. The samples that each corpus has
given so far are counted from the earlier segments, so no sample is lost or read twice. A checkpoint
stores only the segments.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from frontier_llm.data.permutation import make_key, random_uint64
from frontier_llm.errors import ConfigError

BLOCK = 1 << 14


@dataclass(frozen=True)
class Segment:
    """Consecutive samples with the same weights."""

    first_sample: int
    weights: Mapping[str, float]
    """Weights by name of the corpus; their sum is 1."""


def corpus_shares(
    tokens: Mapping[str, int], weights: Mapping[str, float | None], alpha: float
) -> dict[str, float]:
    """Return the share of each corpus in the samples.

    Args:
        tokens: number of tokens of each corpus, by name.
        weights: configured weight of each corpus; all None to derive the shares from the sizes.
        alpha: exponent of the sizes: p ~ tokens^alpha.

    Raises:
        ConfigError: only some corpora have a weight, or a share is too small.

    Paper: mT5, arXiv:2010.11934, section 3.2 (alpha = 0.3).
    """
    given = [weight for weight in weights.values() if weight is not None]
    if given and len(given) < len(weights):
        without = ", ".join(name for name, weight in weights.items() if weight is None)
        raise ConfigError(
            "data.corpora",
            f"no weight for {without}",
            "a weight for every corpus, or for none",
            "add it, or remove all weights: data.blend_alpha then decides",
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
    """Maps each sample of a blend to a corpus and to a sample of that corpus. Thread-safe."""

    def __init__(self, segments: Sequence[Segment], key: int) -> None:
        """Initialise the schedule from a history of weights.

        Args:
            segments: segments in order; the first begins at sample 0, and all name every corpus.
            key: 64 bits, derived from the seed.
        """
        assert segments[0].first_sample == 0, "the first segment begins at sample 0"
        self.segments = tuple(segments)
        self.names = tuple(segments[0].weights)
        self._key = key
        self._quotas = [_quotas([s.weights[name] for name in self.names]) for s in segments]
        self._block = lru_cache(maxsize=4)(self._make_block)
        self._given_before = [np.zeros(len(self.names), dtype=np.int64)]
        for number, (segment, following) in enumerate(pairwise(segments)):
            length = following.first_sample - segment.first_sample
            self._given_before.append(self._given_before[-1] + self._count(number, length))

    @classmethod
    def starting(cls, weights: Mapping[str, float], key: int) -> "Schedule":
        """Return the schedule of a run that starts with these weights."""
        return cls([Segment(0, dict(weights))], key)

    def changed(self, next_sample: int, weights: Mapping[str, float]) -> "Schedule":
        """Return a schedule with other weights from a sample on, and the same samples before it.

        Args:
            next_sample: first sample with the new weights; segments that begin there or later are
                dropped.
            weights: new weights of the same corpora.

        Raises:
            ConfigError: the corpora differ.
        """
        if set(weights) != set(self.names):
            raise ConfigError(
                "data.corpora",
                ", ".join(sorted(weights)),
                f"the corpora that the run started with: {', '.join(sorted(self.names))}",
                "give a corpus a small weight instead of removing it; to add one, start a new run",
            )
        kept = [segment for segment in self.segments if segment.first_sample < next_sample]
        if kept and dict(kept[-1].weights) == dict(weights):
            return Schedule(kept, self._key)
        return Schedule([*kept, Segment(next_sample, dict(weights))], self._key)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (index of the corpus in `names`, index of the sample in that corpus)."""
        starts = [segment.first_sample for segment in self.segments]
        number = bisect_right(starts, index) - 1
        block, place = divmod(index - starts[number], BLOCK)
        corpora, ordinals = self._block(number, block)
        corpus = int(corpora[place])
        before = int(self._given_before[number][corpus]) + block * int(self._quotas[number][corpus])
        return corpus, before + int(ordinals[place])

    def to_meta(self) -> list[dict[str, Any]]:
        """Return the segments as plain JSON, for a checkpoint."""
        return [{"first_sample": s.first_sample, "weights": dict(s.weights)} for s in self.segments]

    def with_history(self, meta: Sequence[Mapping[str, Any]]) -> "Schedule":
        """Return a schedule with the segments that `to_meta` returned and the same key."""
        return Schedule([Segment(s["first_sample"], s["weights"]) for s in meta], self._key)

    def _count(self, number: int, length: int) -> npt.NDArray[np.int64]:
        """Return the number of samples of each corpus in the first `length` of a segment."""
        blocks, rest = divmod(length, BLOCK)
        corpora, _ = self._block(number, blocks)
        partial = np.bincount(corpora[:rest], minlength=len(self.names))
        return blocks * self._quotas[number] + partial

    def _make_block(
        self, number: int, block: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpus of each sample of a block, and its ordinal within that corpus."""
        quotas = self._quotas[number]
        corpora = np.repeat(np.arange(len(quotas)), quotas)
        ordinals = np.concatenate([np.arange(quota) for quota in quotas])
        drawn = random_uint64(BLOCK, make_key(self._key, number, block)) / 2.0**64
        order = np.argsort((ordinals + drawn) / quotas[corpora], kind="stable")
        return corpora[order], ordinals[order]


def _quotas(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Divide BLOCK by weights, at least 1 each, by the largest remainder method."""
    exact = np.asarray(weights, dtype=np.float64) * BLOCK / sum(weights)
    quotas = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := BLOCK - int(quotas.sum())) != 0:
        step = 1 if missing > 0 else -1
        candidates = np.where((quotas > 1) | (step > 0), step * (exact - quotas), -np.inf)
        quotas[int(np.argmax(candidates))] += step
    return quotas
