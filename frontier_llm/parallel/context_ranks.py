"""The ranks that divide the tokens of samples (`parallel.context`), and their exchange."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.geometry.context_cut import Range, context_cut


class ContextRanks:
    """The ranks that divide the tokens of the same samples, and the bytes that this rank sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._sent = Counter[int]()

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[p]` rows to each rank p, and return the rows received. Collective."""
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(
            output, rows.contiguous(), list(received), list(sent), group=self.group
        )
        for rank, count in enumerate(sent):
            if rank != self.rank:
                self._sent[rank] += count * rows[:1].nbytes
        return output

    def take_sent(self) -> list[int]:
        """Return the bytes sent to each rank since the last call."""
        sent, self._sent = self._sent, Counter()
        return [sent[rank] for rank in range(self.size)]


def part_numbers(samples: Sequence[Sequence[int]], context: int, rank: int) -> Tensor:
    """Return the numbers of the tokens of a context rank, [samples, tokens] int64, ascending.

    A sample is given by the lengths of its documents.
    """
    cuts = [context_cut(lengths, context) for lengths in samples]
    return torch.stack([token_numbers(cut[rank]) for cut in cuts])


def token_numbers(ranges: Sequence[Range]) -> Tensor:
    """Return the numbers of the tokens in some ranges, [tokens] int64."""
    return torch.cat([torch.arange(*tokens) for tokens in ranges] or [torch.arange(0)])
