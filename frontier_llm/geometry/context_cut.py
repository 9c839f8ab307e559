"""Cut the tokens of a sample over context ranks, and find the tokens that each of them reads.

All ranks have s / c of the s tokens of a sample. What they compute are pairs of a query and a key
of the same document. What they send are rows, the keys and values of a token that another rank
reads: a rank reads each document up to its own last token in it.

If a sample is one document, it is cut into 2c equal ranges, of which context rank r has number r
and number 2c - 1 - r. All ranks then compute equally many pairs (the zig-zag of Llama 3,
arXiv:2407.21783, section 3.3.2). If it has several, a zig-zag leaves some ranks with several times
the mean of the pairs, so the cut is chosen by their lengths.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, permutations
from math import exp, isqrt
from statistics import NormalDist
from typing import NamedTuple

Range = tuple[int, int]
"""First token of a sample, and the token after the last one."""
Piece = tuple[int, int, int]
"""First token of a document, and the range of some of its tokens."""
MOST_WORK = 1.05
"""Pairs of the rank with most of them that a cut may have to send fewer rows, relative to the
mean."""
_FULL = (1.0, 0.8, 0.5)
"""Pairs up to which ranks are filled with long documents, relative to the mean."""
_SWAPS = 40
"""Most swaps that even out a cut; 900 drawn samples of 128k tokens needed at most 11 on 8 ranks."""
_SPREAD = 1.4
"""Standard deviation of the logarithm of the lengths of typical documents: text of the web has
1.2, mixed corpora 1.6."""


def context_cut(lengths: Sequence[int], context: int) -> list[list[Range]]:
    """Return the ranges of each context rank, ascending; 2 x context divides the tokens.

    The result depends on the lengths of the documents alone, so all ranks find the same. Of some
    cuts it has the fewest rows among those with at most `MOST_WORK`; if there is none, the least
    work of the rank with most.
    """
    return _chosen(tuple(lengths), context)


@lru_cache(1024)  # the loader has found it when a step asks for it
def _chosen(lengths: tuple[int, ...], context: int) -> list[list[Range]]:
    size = sum(lengths) // (2 * context)
    zigzag = [
        [(number * size, (number + 1) * size) for number in (rank, 2 * context - 1 - rank)]
        for rank in range(context)
    ]
    mean = sum(map(_pairs, lengths)) / context
    cuts = [[list(pieces(lengths, ranges)) for ranges in zigzag]]
    if len(lengths) > 1:
        cuts += [_longest_first(lengths, context, int(full * mean)) for full in _FULL]
    most = [_even_out(cut, mean) for cut in cuts]
    rows = [sum(stop - first for of_rank in cut for first, stop in _last(of_rank)) for cut in cuts]
    best = min(range(len(cuts)), key=lambda n: (max(most[n], MOST_WORK * mean), rows[n]))
    return [_joined(of_rank) for of_rank in cuts[best]]


def _longest_first(lengths: Sequence[int], context: int, full: int) -> list[list[Piece]]:
    """Give each document, longest first, to the rank with the least work.

    If it would have more than `full` pairs, it gets only the end of the document. The rest is
    placed like a shorter document, so few rows are sent: only those of the rest.
    """
    room, work = [sum(lengths) // context] * context, [0] * context
    cut: list[list[Piece]] = [[] for _ in room]
    starts = accumulate(lengths, initial=0)
    left = sorted(zip(lengths, starts, strict=False))
    while left:
        length, first = left.pop()
        rank = min(filter(room.__getitem__, range(context)), key=work.__getitem__)
        start = isqrt(max(0, length**2 - 2 * max(0, full - work[rank])))
        if not 0 < start < length:
            start, fits = 0, [rank for rank in range(context) if room[rank] >= length]
            rank = min(fits, key=work.__getitem__) if fits else room.index(max(room))
        start = max(start, length - room[rank])
        cut[rank].append((first, first + start, first + length))
        room[rank] -= length - start
        work[rank] += _pairs(length) - _pairs(start)
        if start:
            insort(left, (start, first))
    return cut


def _even_out(cut: list[list[Piece]], mean: float) -> float:
    """Swap equally many tokens of two ranks until none has more than `MOST_WORK`; return the most.

    The rank with most pairs gives the end of a piece, and takes the begin of that piece of the rank
    with the fewest pairs that is nearest to the begin of its document.
    """
    work = [sum(map(_piece_pairs, of_rank)) for of_rank in cut]
    for _ in range(_SWAPS):
        most, least = work.index(max(work)), work.index(min(work))
        if work[most] <= MOST_WORK * mean:
            break
        excess = int(min(work[most] - mean, mean - work[least]))
        taken = min(cut[least], key=lambda piece: (piece[1] - piece[0], piece[1] - piece[2]))
        first, start, stop = taken
        swaps = list[tuple[bool, int, int, Piece]]()
        for given in cut[most]:
            # x tokens have x * (distance - x) pairs more than those that are taken
            distance = given[2] - given[0] - (start - first)
            tokens = (distance - isqrt(max(0, distance**2 - 4 * excess))) // 2
            tokens = min(tokens, given[2] - given[1], stop - start)
            if tokens > 0:
                pairs = tokens * (distance - tokens)
                enough = 10 * pairs >= 9 * excess
                swaps.append((not enough, given[2] - given[0] if enough else -pairs, tokens, given))
        if not swaps:
            break
        _, _, tokens, given = min(swaps)
        _move(cut, most, least, given, (given[2] - tokens, given[2]))
        _move(cut, least, most, taken, (start, start + tokens))
        for rank in (most, least):
            work[rank] = sum(map(_piece_pairs, cut[rank]))
    return max(work)


def _move(cut: list[list[Piece]], giver: int, taker: int, piece: Piece, moved: Range) -> None:
    """Move an end of a piece from one rank to another."""
    first, *kept = piece
    cut[giver].remove(piece)
    cut[giver] += [
        (first, *part) for part in ((kept[0], moved[0]), (moved[1], kept[1])) if part[0] < part[1]
    ]
    cut[taker].append((first, *moved))


def _pairs(tokens: int) -> int:
    """Count the pairs of a query and a key in the first tokens of a document."""
    return tokens * (tokens + 1) // 2


def _piece_pairs(piece: Piece) -> int:
    first, start, stop = piece
    return _pairs(stop - first) - _pairs(start - first)


def _joined(of_rank: Iterable[Piece]) -> list[Range]:
    """Return the ranges of pieces, ascending and without borders between neighbours."""
    ranges = list[Range]()
    for start, stop in sorted(piece[1:] for piece in of_rank):
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return ranges


def pieces(lengths: Sequence[int], ranges: Sequence[Range]) -> Iterator[Piece]:
    """Yield the pieces of documents in some ranges, in their order.

    `lengths` are those of all documents of the sample.
    """
    borders = list(accumulate(lengths, initial=0))
    for start, stop in ranges:
        number = bisect(borders, start)
        while start < stop:
            end = min(stop, borders[number])
            yield borders[number - 1], start, end
            start, number = end, number + 1


def _last(of_rank: Iterable[Piece]) -> list[Range]:
    """Return of each document with a piece the tokens up to the end of its last piece."""
    last = dict[int, int]()
    for first, _, stop in of_rank:
        last[first] = max(stop, last.get(first, 0))
    return sorted(last.items())


def read_by(lengths: Sequence[int], ranges: Sequence[Range]) -> list[Range]:
    """Return the tokens whose keys a rank reads: of each document all up to its last query."""
    return _last(pieces(lengths, ranges))


def overlap(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the tokens that two ascending lists of ranges have in common."""
    both, one, other = list[Range](), 0, 0
    while one < len(some) and other < len(others):
        start = max(some[one][0], others[other][0])
        stop = min(some[one][1], others[other][1])
        if start < stop:
            both.append((start, stop))
        if stop == some[one][1]:
            one += 1
        else:
            other += 1
    return both


def sent_tokens(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Count the tokens of one rank that another one reads: [context][context], its own included."""
    cut = context_cut(lengths, context)
    read = [read_by(lengths, ranges) for ranges in cut]
    return [[sum(b - a for a, b in overlap(own, wanted)) for wanted in read] for own in cut]


def most_rows(samples: Iterable[Sequence[int]], context: int) -> int:
    """Count the rows of the rank that sends or receives most of them, its own not included.

    A sample is given by the lengths of its documents.
    """
    sent = [sent_tokens(lengths, context) for lengths in samples]
    there, back = [0] * context, [0] * context
    for one, other in permutations(range(context), 2):
        rows = sum(of_sample[one][other] for of_sample in sent)
        there[one] += rows
        back[other] += rows
    return max(*there, *back)


class HeadExchange(NamedTuple):
    """The exchange by which each context rank computes some heads of whole samples.

    A rank sends queries, keys and values of its tokens to the ranks that compute their heads, and
    receives the outputs (DeepSpeed Ulysses, arXiv:2309.14509). A key head that several ranks need
    is sent to each of them.
    """

    context: int
    heads: int
    """Heads of queries of a tensor-parallel rank."""
    key_heads: int
    """Heads of keys, and as many of values."""

    @property
    def is_possible(self) -> bool:
        """Whether each rank gets as many heads, all of whose keys it has."""
        context, keys = self.context, self.key_heads
        return self.heads % context == 0 and (keys % context == 0 or context % keys == 0)

    @property
    def sent(self) -> int:
        """Heads that a token sends to each other rank in a pass: of all four tensors."""
        return 2 * (self.heads // self.context + max(self.key_heads // self.context, 1))

    def pays(self, rows: int, tokens: int, *, recomputes: bool) -> bool:
        """Return whether a rank sends less than the keys and values of `rows`.

        It has `tokens` tokens. The backward pass sends once, or twice if it `recomputes` the layer;
        with rows it always sends twice, because received keys are not kept.
        """
        passes = 3 if recomputes else 2
        by_heads = passes * tokens * (self.context - 1) * self.sent
        return self.is_possible and by_heads < 3 * rows * 2 * self.key_heads


class CutWork(NamedTuple):
    """What the other ranks of a cut wait for."""

    imbalance: float
    """Pairs of the rank with most of them, relative to the mean."""
    rows: int
    """Rows of the rank that sends or receives most of them, its own not included."""


@lru_cache
def typical_work(tokens: int, read_share: float, context: int) -> CutWork:
    """Return the work in a sample of `typical_lengths`."""
    lengths = typical_lengths(tokens, read_share)
    cut = context_cut(lengths, context)
    pairs = [sum(map(_piece_pairs, pieces(lengths, ranges))) for ranges in cut]
    return CutWork(max(pairs) * context / sum(pairs), most_rows([lengths], context))


def typical_lengths(tokens: int, read_share: float) -> list[int]:
    """Return the documents of a sample that have about this share of its pairs.

    Their lengths are evenly spaced quantiles of a log-normal distribution.
    """
    sizes = [1.0]
    while sum(size * size for size in sizes) > read_share * sum(sizes) ** 2 and len(sizes) < tokens:
        count = len(sizes) + 1 + len(sizes) // 16
        steps = ((number + 0.5) / count for number in range(count))
        sizes = [exp(NormalDist(0, _SPREAD).inv_cdf(step)) for step in steps]
    ends = [round(end * tokens / sum(sizes)) for end in accumulate(sizes, initial=0.0)]
    return [stop - start for start, stop in pairwise(ends) if stop > start]
