"""Keys and values that context ranks send, and how they share the work, for drawn documents."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log

import numpy as np

from frontier_llm.geometry.context_cut import Range, context_cut, pieces, read_by

TOKENS, RANKS = 131072, 8
"""Tokens per sample, and the context ranks that divide it."""
ROW_BYTES = 2 * 8 * 128 * 2
"""Key and value of a token in a layer of Llama 3 8B: 8 heads of width 128 in bf16."""
TEXTS = {"web": (500, 1.2), "mixed": (1500, 1.6), "long": (8000, 1.5)}
"""Median length of documents in tokens, and standard deviation of its logarithm."""


@dataclass(frozen=True)
class CutFigure:
    """One way to cut the samples of a text."""

    text: str
    cut: str
    sent_bytes: float
    """Bytes that all ranks send in the forward pass of a layer, mean over samples."""
    gathered_share: float
    """The same, relative to a gather of all keys and values."""
    balance: float
    """Pairs of queries and keys of the rank with most, relative to the mean; mean over samples."""
    worst_balance: float
    """The same, of the worst sample."""


def cut_figures(count: int) -> Iterator[CutFigure]:
    """Cut this many samples of each text in several ways."""
    blind = context_cut([TOKENS], RANKS)
    size = TOKENS // RANKS
    in_order = [[(rank * size, (rank + 1) * size)] for rank in range(RANKS)]
    cuts: dict[str, Callable[[Sequence[int]], list[list[Range]]]] = {
        "by documents": partial(context_cut, context=RANKS),
        "zig-zag": lambda _: blind,
        "in order": lambda _: in_order,
    }
    gathered = TOKENS * (RANKS - 1)
    for text in TEXTS:
        found = {name: list[tuple[int, float]]() for name in cuts}
        for lengths in drawn_samples(text, count):
            for name, cut in cuts.items():
                found[name].append(measure(lengths, cut(lengths)))
        for name, figures in found.items():
            rows, balances = zip(*figures, strict=True)
            mean, balance = float(np.mean(rows)), float(np.mean(balances))
            share, worst = mean / gathered, max(balances)
            yield CutFigure(text, name, mean * ROW_BYTES, share, balance, worst)
            if name == "zig-zag":
                all_bytes = float(gathered * ROW_BYTES)
                yield CutFigure(text, "zig-zag, gathered", all_bytes, 1.0, balance, worst)


def drawn_samples(text: str, count: int, tokens: int = TOKENS) -> Iterator[list[int]]:
    """Yield the lengths of the documents of samples that follow each other in a text.

    In samples of fewer `tokens` than `TOKENS` all documents are shorter by the same factor.
    """
    median, spread = TEXTS[text][0] * tokens / TOKENS, TEXTS[text][1]
    documents = 1000 + int(1.2 * count * tokens / (median * exp(spread**2 / 2)))
    drawn = np.random.default_rng(3).lognormal(log(median), spread, documents)
    ends = np.cumsum(np.ceil(drawn).astype(np.int64))
    for sample in range(count):
        first = sample * tokens
        inside = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, first + tokens)]
        yield np.diff([0, *(inside - first), tokens]).tolist()


def measure(lengths: Sequence[int], cut: Sequence[Sequence[Range]]) -> tuple[int, float]:
    """Return the rows that all ranks receive, and the most pairs of a rank relative to the mean."""
    rows = sum(stop - first for ranges in cut for first, stop in read_by(lengths, ranges))
    work = [
        sum((start + stop + 1 - 2 * first) * (stop - start) for first, start, stop in of_rank)
        for of_rank in (pieces(lengths, ranges) for ranges in cut)
    ]
    return rows - sum(lengths), max(work) * len(work) / sum(work)
