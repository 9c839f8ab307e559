"""Attention of samples that are cut over context ranks.

Before attention each context rank sends the keys and values of its tokens to the ranks whose
queries read them (geometry/context_cut.py), and after the backward pass their gradients come back.
If documents are separate, a rank sends nothing of documents that no other rank reads. The received
keys and values are not kept for the backward pass, which receives them again, unless the whole
layer is computed again anyway.

Where it sends less, ranks exchange heads instead: each rank computes some heads of whole samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frontier_llm.geometry.context_cut import (
    HeadExchange,
    Range,
    context_cut,
    most_rows,
    overlap,
    pieces,
    read_by,
)
from frontier_llm.model.attention import attend, attend_document, recomputed
from frontier_llm.model.reads import Documents, Reads, Scores
from frontier_llm.parallel.context_ranks import ContextRanks, part_numbers, token_numbers


class _Exchange(torch.autograd.Function):
    """Sends rows to other ranks; their gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ranks: ContextRanks, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, (sent, received)
        return ranks.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return ctx.ranks.exchange(grads[0], received, sent), None, None, None


class _Routes(NamedTuple):
    """What a rank sends, and what its pieces of documents read.

    `rows` are the tokens that are sent, rank by rank; they are numbered over all samples. `keys`
    are the received rows that the pieces read, one piece after the other. `pieces` has the number
    of queries and of keys of each piece of each sample.
    """

    rows: Tensor
    sent: list[int]
    received: list[int]
    keys: Tensor
    pieces: list[list[tuple[int, int]]]


class ContextPart:
    """The kernel for queries of this rank's part of the samples of a micro-batch.

    The samples have `tokens` tokens each. Without documents a sample is one document. With `keeps`
    the received keys and values are kept for the backward pass.
    """

    def __init__(
        self,
        ranks: ContextRanks,
        samples: int,
        tokens: int,
        documents: Documents | None,
        device: torch.device,
        *,
        keeps: bool,
    ) -> None:
        self._ranks, self.length, self._keeps, self._device = ranks, tokens, keeps, device
        self._samples, self._documents = samples, documents

    @cached_property
    def _lengths(self) -> list[list[int]]:
        if self._documents is None:
            return [[self.length]] * self._samples
        return self._documents.lengths

    @cached_property
    def _cuts(self) -> list[list[list[Range]]]:
        return [context_cut(lengths, self._ranks.size) for lengths in self._lengths]

    @cached_property
    def tokens(self) -> Tensor:
        """Numbers of the tokens of this rank, [b, n]; without documents [1, n]."""
        samples = self._lengths[:1] if self._documents is None else self._lengths
        return part_numbers(samples, self._ranks.size, self._ranks.rank)

    @cached_property
    def _most_rows(self) -> int:
        return most_rows(self._lengths, self._ranks.size)

    @cached_property
    def _places(self) -> Tensor:
        """Places of the tokens of all ranks in the samples, one rank after the other, [c * b * n].

        Samples follow each other: token t of sample b has the place b * s + t.
        """
        size = self._ranks.size
        of_ranks = [part_numbers(self._lengths, size, rank) for rank in range(size)]
        first = torch.arange(self._samples)[:, None] * self.length
        return (torch.stack(of_ranks) + first).flatten().to(self._device)

    @cached_property
    def _routes(self) -> _Routes:
        rank, size = self._ranks.rank, self._ranks.size
        sent, arrived = ([list[Tensor]() for _ in range(size)] for _ in range(2))
        for sample, (lengths, cut) in enumerate(zip(self._lengths, self._cuts, strict=True)):
            own, wanted = token_numbers(cut[rank]), [read_by(lengths, ranges) for ranges in cut]
            local = torch.full((self.length,), -1)
            local[own] = sample * len(own) + torch.arange(len(own))
            for other in range(size):
                sent[other].append(local[token_numbers(overlap(cut[rank], wanted[other]))])
                arrived[other].append(token_numbers(overlap(cut[other], wanted[rank])))
        places = [torch.full((self.length,), -1) for _ in self._cuts]
        first = 0
        for of_rank in arrived:
            for place, numbers in zip(places, of_rank, strict=True):
                place[numbers] = torch.arange(first, first + len(numbers))
                first += len(numbers)
        rows = torch.cat([numbers for of_rank in sent for numbers in of_rank])
        to, back = ([sum(map(len, of_rank)) for of_rank in of] for of in (sent, arrived))
        keys, sizes = list[Tensor](), []
        for lengths, cut, place in zip(self._lengths, self._cuts, places, strict=True):
            own_pieces = list(pieces(lengths, cut[rank]))
            keys += [place[first:stop] for first, _, stop in own_pieces]
            sizes.append([(stop - start, stop - first) for first, start, stop in own_pieces])
        return _Routes(rows.to(self._device), to, back, torch.cat(keys).to(self._device), sizes)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores
    ) -> Tensor:
        """Compute causal attention: [b, h, n, d], with the dtype of the query. Collective.

        The query is [b samples, h heads, n tokens of this rank, d]; key and value are [b, g, n, d],
        where g divides h.
        """
        assert scores.dropout == 0, "refused in config/rules.py"
        heads = HeadExchange(self._ranks.size, query.shape[1], key.shape[1])
        if heads.pays(self._most_rows, query.shape[0] * query.shape[2], recomputes=self._keeps):
            return self._attend_by_heads(query, key, value, reads, scores)
        if self._keeps:
            return self._attend(query, key, value, reads, scores)
        run = partial(self._attend, reads=reads, scores=replace(scores, recompute=False))
        return recomputed(run, query, key, value, dropout=0.0)

    @torch._disable_dynamo
    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores
    ) -> Tensor:
        routes = self._routes
        own = torch.stack([key, value]).permute(1, 3, 0, 2, 4).flatten(0, 1)  # [b * n, 2, g, d]
        read = _Exchange.apply(own[routes.rows], self._ranks, routes.sent, routes.received)
        # taken at once, because the gradient of each taking is as large as all received rows
        taken = read[routes.keys].permute(1, 2, 0, 3)  # [2, g, t, d]
        keys = iter(taken.split([t for sizes in routes.pieces for _, t in sizes], dim=2))
        samples, within = [], replace(reads, queries=None, keys=None)
        for of_sample, sizes in zip(query, routes.pieces, strict=True):
            outputs = []
            for part in of_sample[None].split([n for n, _ in sizes], dim=2):
                key, value = next(keys)[:, None]
                start = key.shape[2] - part.shape[2]  # the last query reads the last key
                outputs.append(attend_document(part, key, value, within, scores, start))
            samples.append(torch.cat(outputs, dim=2))
        return torch.cat(samples)

    @torch._disable_dynamo
    def _attend_by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores
    ) -> Tensor:
        size, (samples, _, tokens, _) = self._ranks.size, query.shape
        places = self._places
        of_ranks = [_divided(x, size) for x in (query, key, value)]
        sent = torch.cat(of_ranks, dim=3)
        whole = self._to_all(sent).flatten(0, 2).index_select(0, places.argsort())
        whole = whole.unflatten(0, (samples, self.length)).transpose(1, 2)
        query, key, value = whole.split([x.shape[3] for x in of_ranks], dim=1)
        documents = self._documents
        reads = replace(reads, queries=documents, keys=documents, kernel=None)
        output = attend(query, key, value, reads, scores).transpose(1, 2).flatten(0, 1)
        output = output.index_select(0, places).unflatten(0, (size, samples, tokens))
        return self._to_all(output).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _to_all(self, parts: Tensor) -> Tensor:
        """Send one part of a tensor [c, ...] to each rank, and return the parts received."""
        once = [1] * self._ranks.size
        received: Tensor = _Exchange.apply(parts, self._ranks, once, once)
        return received


def _divided(tensor: Tensor, ranks: int) -> Tensor:
    """Divide heads [b, h, n, d] over ranks: [ranks, b, n, heads of a rank, d].

    If there are fewer heads than ranks, several ranks get the same one.
    """
    repeated = tensor.repeat_interleave(max(ranks // tensor.shape[1], 1), dim=1)
    return repeated.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4)
