"""Cut the tokens of a sample over context ranks, and find the tokens that each of them reads.

A sample of s tokens is cut into 2c equal ranges, of which context rank r has number r and number
2c - 1 - r. If documents are joined, all ranks then compute equally many pairs of queries and keys
(the zig-zag of Llama 3, arXiv:2407.21783, section 3.3.2). All ranks always have s / c tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

Range = tuple[int, int]
"""First token of a sample, and the token after the last one."""


def context_cut(tokens: int, context: int) -> list[list[Range]]:
    """Return the ranges of each context rank, ascending; 2 x context divides the tokens."""
    size = tokens // (2 * context)
    return [
        [(number * size, (number + 1) * size) for number in (rank, 2 * context - 1 - rank)]
        for rank in range(context)
    ]


def pieces(lengths: Sequence[int], ranges: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """Yield (first token of the document, start, stop) of each piece of a document, ascending.

    `lengths` are those of all documents of the sample.
    """
    borders = list(pairwise(accumulate(lengths, initial=0)))
    for start, stop in ranges:
        for first, end in borders:
            if first < stop and start < end:
                yield first, max(start, first), min(stop, end)


def read_by(lengths: Sequence[int], ranges: Sequence[Range]) -> list[Range]:
    """Return the tokens whose keys a rank reads: of each document all up to its last query."""
    last = dict[int, int]()
    for first, _, stop in pieces(lengths, ranges):
        last[first] = stop
    return sorted(last.items())


def overlap(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the tokens that two ascending lists of ranges have in common."""
    both = ((max(a, x), min(b, y)) for a, b in some for x, y in others)
    return [(start, stop) for start, stop in both if start < stop]


def sent_tokens(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Count the tokens of one rank that another one reads: [context][context], its own included."""
    cut = context_cut(sum(lengths), context)
    read = [read_by(lengths, ranges) for ranges in cut]
    return [[sum(b - a for a, b in overlap(own, wanted)) for wanted in read] for own in cut]
