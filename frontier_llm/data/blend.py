"""Choose the corpus that each sample of a blend, a mixture of several corpora, comes from.

The choice is computed from the sample's index alone. The samples of a run are divided into blocks
of BLOCK samples. In each block corpus c supplies a fixed number q_c of samples, its *quota*, in
proportion to its weight. Its k-th sample of the block has the sort key (k + u) / q_c, where u is
drawn from [0, 1) for each sample. The block consists of its samples sorted by key. Any range of
consecutive samples therefore has nearly the requested shares, each corpus is read in its own order
without gaps, and only the weights are stored.

When the weights change at a sample, or corpora are added, a new *segment* begins there. A corpus
has no samples in the segments before it was added. The number of samples that each corpus has
supplied so far is computed from the earlier segments, so no sample is lost or read twice. A
checkpoint stores only the segments.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from frontier_llm.config.reading import BLOCK
from frontier_llm.data.permutation import make_key, random_uint64
from frontier_llm.errors import ConfigError


@dataclass(frozen=True)
class Segment:
    """Consecutive samples with the same weights."""

    first_sample: int
    weights: Mapping[str, float]
    """Weights by name of the corpus; their sum is 1."""


class Schedule:
    """Maps each sample of a run to one of the corpora, and to a sample of that corpus.

    The first segment begins at sample 0. A segment names the corpora of the segment before it, and
    maybe more. The class is thread-safe.
    """

    def __init__(self, segments: Sequence[Segment], key: int) -> None:
        assert segments[0].first_sample == 0, "the first segment begins at sample 0"
        self.segments = tuple(segments)
        self.names = tuple(dict.fromkeys(name for s in segments for name in s.weights))
        self._key = key
        self._quotas = [_quotas([s.weights.get(name, 0) for name in self.names]) for s in segments]
        self._block = lru_cache(maxsize=4)(self._make_block)
        # per segment: the number of samples that each corpus has supplied before the segment
        self._supplied_before = [np.zeros(len(self.names), dtype=np.int64)]
        for number, (segment, following) in enumerate(pairwise(segments)):
            length = following.first_sample - segment.first_sample
            supplied = self._count(number, length)
            self._supplied_before.append(self._supplied_before[-1] + supplied)

    @classmethod
    def starting(cls, weights: Mapping[str, float], key: int) -> "Schedule":
        """Return the schedule of a run that starts with these weights."""
        return cls([Segment(0, dict(weights))], key)

    def changed(self, next_sample: int, weights: Mapping[str, float]) -> "Schedule":
        """Return a schedule with new weights from one sample on. Earlier samples do not change.

        Segments that begin at this sample or later are dropped. The weights may name added corpora.
        """
        kept = [segment for segment in self.segments if segment.first_sample < next_sample]
        read = kept[-1].weights if kept else {}
        if not set(read) <= set(weights):
            raise ConfigError(
                "data.corpora",
                ", ".join(sorted(weights)),
                f"also the corpora that the run has read: {', '.join(sorted(read))}",
                "give a corpus a small weight instead of removing it",
            )
        if kept and dict(kept[-1].weights) == dict(weights):
            return Schedule(kept, self._key)
        return Schedule([*kept, Segment(next_sample, dict(weights))], self._key)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (index of the corpus in `names`, index of the sample in that corpus)."""
        number = self._segment(index)
        block, position = divmod(index - self.segments[number].first_sample, BLOCK)
        corpora, ordinals = self._block(number, block)
        corpus = int(corpora[position])
        in_earlier_segments = int(self._supplied_before[number][corpus])
        in_earlier_blocks = block * int(self._quotas[number][corpus])
        return corpus, in_earlier_segments + in_earlier_blocks + int(ordinals[position])

    def supplied(self, index: int) -> dict[str, int]:
        """Return how many samples each corpus supplies before a sample."""
        number = self._segment(index)
        count = self._count(number, index - self.segments[number].first_sample)
        counts = self._supplied_before[number] + count
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _segment(self, index: int) -> int:
        return bisect_right(self.segments, index, key=lambda segment: segment.first_sample) - 1

    def to_meta(self) -> list[dict[str, Any]]:
        """Return the segments as plain JSON, for a checkpoint."""
        return [{"first_sample": s.first_sample, "weights": dict(s.weights)} for s in self.segments]

    def with_history(self, meta: Sequence[Mapping[str, Any]]) -> "Schedule":
        """Return a schedule with this one's key and the segments of a checkpoint (`to_meta`)."""
        return Schedule([Segment(s["first_sample"], s["weights"]) for s in meta], self._key)

    def _count(self, number: int, length: int) -> npt.NDArray[np.int64]:
        blocks, rest = divmod(length, BLOCK)
        corpora, _ = self._block(number, blocks)
        partial = np.bincount(corpora[:rest], minlength=len(self.names))
        return blocks * self._quotas[number] + partial

    def _make_block(
        self, number: int, block: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpus of each sample of a block, and its rank among those of the corpus."""
        quotas = self._quotas[number]
        corpora = np.repeat(np.arange(len(quotas)), quotas)
        ordinals = np.concatenate([np.arange(quota) for quota in quotas])
        drawn = random_uint64(BLOCK, make_key(self._key, number, block)) / 2.0**64
        order = np.argsort((ordinals + drawn) / quotas[corpora], kind="stable")
        return corpora[order], ordinals[order]


def _quotas(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Divide the samples of a block among the corpora by the largest remainder method.

    The numbers are in proportion to the weights and have the sum BLOCK. Each is at least 1, or 0
    for a weight of 0.
    """
    exact_quotas = np.asarray(weights, dtype=np.float64) * BLOCK / sum(weights)
    quotas = np.maximum(np.floor(exact_quotas).astype(np.int64), exact_quotas > 0)
    # correct the sum by one sample at a time, where rounding has changed a quota most
    while (missing := BLOCK - int(quotas.sum())) != 0:
        change = 1 if missing > 0 else -1
        can_change = (quotas > 1) | ((change > 0) & (quotas > 0))
        rounding = np.where(can_change, change * (exact_quotas - quotas), -np.inf)
        quotas[int(np.argmax(rounding))] += change
    return quotas
