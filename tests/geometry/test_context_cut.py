"""The cut of a sample over context ranks, against counts of single tokens."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.context_cut import (
    MOST_WORK,
    context_cut,
    overlap,
    sent_tokens,
    typical_lengths,
    typical_work,
)
from tests.properties import examples

DRAWS = {"web": (500, 1.2), "mixed": (1500, 1.6), "long": (8000, 1.5)}
"""Median length of documents in tokens, and standard deviation of its logarithm."""


def zigzag(tokens: int, context: int) -> list[list[tuple[int, int]]]:
    size = tokens // (2 * context)
    numbers = [(rank, 2 * context - 1 - rank) for rank in range(context)]
    return [[(n * size, (n + 1) * size) for n in both] for both in numbers]


def drawn(draw: str, tokens: int, seed: int) -> list[int]:
    """Return the documents of a sample of text, whose first and last document are cut."""
    random, (median, spread) = np.random.default_rng(seed), DRAWS[draw]
    lengths = np.ceil(random.lognormal(np.log(median), spread, tokens // 20))
    ends = np.cumsum(lengths.astype(int)) - int(random.integers(8 * median))
    return np.diff([0, *ends[(ends > 0) & (ends < tokens)], tokens]).tolist()


def firsts(lengths: list[int]) -> np.ndarray:
    """Return for each token the first token of its document."""
    return np.repeat(list(accumulate(lengths, initial=0))[:-1], lengths)


def masks(cut: list[list[tuple[int, int]]], tokens: int) -> np.ndarray:
    """Return how often each rank has each token, [ranks, tokens]."""
    found = np.zeros((len(cut), tokens), int)
    for mask, ranges in zip(found, cut, strict=True):
        for start, stop in ranges:
            mask[start:stop] += 1
    return found


def balance(lengths: list[int], own: np.ndarray) -> float:
    """Return the pairs of the rank with most of them, relative to the mean."""
    work = own @ (np.arange(sum(lengths)) - firsts(lengths) + 1)
    return float(work.max() / work.mean())


def rows(lengths: list[int], own: np.ndarray) -> np.ndarray:
    """Count the tokens of each rank that each other one reads, by the pairs of a causal mask."""
    tokens, first = np.arange(sum(lengths)), firsts(lengths)
    counts = np.zeros((len(own), len(own)), int)
    for reader, mask in enumerate(own):
        read = np.zeros(len(tokens), bool)
        for query in np.flatnonzero(mask):
            read[first[query] : query + 1] = True
        counts[:, reader] = (own * read).sum(1)
    return counts


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draw lengths of documents whose sum is a multiple of twice the context ranks."""
    context = draw(st.integers(2, 5))
    tokens = 2 * context * draw(st.integers(1, 40))
    borders = draw(st.sets(st.integers(1, tokens - 1), max_size=30))
    return [stop - start for start, stop in pairwise([0, *sorted(borders), tokens])], context


@examples(300)
@given(samples())
def test_every_cut_divides_tokens_and_sends_what_is_counted(case: tuple[list[int], int]) -> None:
    lengths, context = case
    tokens = sum(lengths)
    cut = context_cut(lengths, context)
    for ranges in cut:
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges)), "joined, ascending"
        assert all(start < stop for start, stop in ranges)
    own, blind = masks(cut, tokens), masks(zigzag(tokens, context), tokens)
    assert (own.sum(0) == 1).all()
    assert (own.sum(1) == tokens // context).all()
    counts = rows(lengths, own)
    assert (counts == sent_tokens(lengths, context)).all()
    assert balance(lengths, own) <= max(MOST_WORK, balance(lengths, blind)) + 1e-9
    if balance(lengths, blind) <= MOST_WORK:
        sent = [np.tril(n, -1).sum() + np.triu(n, 1).sum() for n in (counts, rows(lengths, blind))]
        assert sent[0] <= sent[1]


@pytest.mark.parametrize("context", [1, 2, 3, 8])
def test_a_joined_sample_is_a_zigzag(context: int) -> None:
    tokens = 48 * context
    found = masks(context_cut([tokens], context), tokens)
    assert (found == masks(zigzag(tokens, context), tokens)).all()
    assert balance([tokens], found) == 1


@pytest.mark.parametrize("context", [2, 4, 8])
def test_equal_documents_stay_whole(context: int) -> None:
    """A zig-zag would cut each of them."""
    lengths = [40] * 3 * context
    sent = np.array(sent_tokens(lengths, context))
    assert sent.sum() == np.trace(sent) == sum(lengths)
    blind = rows(lengths, masks(zigzag(sum(lengths), context), sum(lengths)))
    assert blind.sum() > np.trace(blind)


@pytest.mark.parametrize(
    ("draw", "tokens", "context", "share"),
    [
        ("web", 32768, 4, 0.2), ("web", 131072, 8, 0.06), ("mixed", 131072, 8, 0.33),
        ("long", 131072, 8, 0.55),
    ],
)  # fmt: skip
def test_drawn_text_is_balanced_and_sends_few_rows(
    draw: str, tokens: int, context: int, share: float
) -> None:
    """Relative to what the ranks receive if each of them gathers all rows."""
    sent, read, most = [], [], []
    for seed in range(30):
        lengths = drawn(draw, tokens, seed)
        own = masks(context_cut(lengths, context), tokens)
        most.append(balance(lengths, own))
        assert most[-1] <= MOST_WORK
        counts = np.array(sent_tokens(lengths, context))
        sent.append((counts.sum() - np.trace(counts)) / tokens / (context - 1))
        read.append(sum(n * n for n in lengths) / tokens**2)
    assert np.mean(sent) < share
    typical = np.array(sent_tokens(typical_lengths(tokens, float(np.mean(read))), context))
    priced = (typical.sum() - np.trace(typical)) / tokens / (context - 1)
    assert priced == pytest.approx(np.mean(sent), rel=0.3)
    work = typical_work(tokens, float(np.mean(read)), context)
    assert work.imbalance == pytest.approx(np.mean(most), abs=0.03)
    others = typical - np.diag(np.diag(typical))
    assert work.rows == max(others.sum(0).max(), others.sum(1).max())


def test_typical_joined_documents_are_one_document() -> None:
    assert typical_lengths(64, 1.0) == [64]
    # the last rank sends both of its ranges to all others, and the first one receives as much
    assert typical_work(64, 1.0, 4) == (1.0, 2 * 3 * 8)


def test_overlap_has_common_tokens_in_order() -> None:
    some, others = [(0, 4), (6, 9), (12, 13)], [(1, 2), (3, 7), (8, 20)]
    assert overlap(some, others) == [(1, 2), (3, 4), (6, 7), (8, 9), (12, 13)]
