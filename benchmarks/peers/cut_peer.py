"""Samples of web text that are cut over context ranks, as contenders of bench_sharding.py.

A sample has --sequence tokens of each rank; the lengths of its documents are those of samples of
131,072 tokens, all reduced by the same factor (testbed/cut_texts.py). Contenders differ in the cut
and the exchange alone, so their losses are equal:
    context-documents  as training does: cut by the lengths of the documents
    context-zigzag     cut without regard to documents; ranks send the keys and values that are read
    context-gather     the same, and each rank receives all keys and values
    context-heads      cut by documents; each rank computes some heads of whole samples
"""

from collections.abc import Sequence
from itertools import islice

import torch

from benchmarks.peers.ours import Ours
from benchmarks.peers.turn import ADAMW, CLIP_NORM, MicroBatch, Turn
from benchmarks.testbed.cut_texts import drawn_samples
from frontier_llm.data.batch import Batch
from frontier_llm.geometry import context_cut
from frontier_llm.geometry.context_cut import HeadExchange, Range
from frontier_llm.model import cut_samples


def make(turn: Turn, rank: int) -> "Cut":
    """Build one rank of the contender. Collective over all ranks."""
    _choose(turn.contender)
    return Cut(turn, rank)


def overrides(turn: Turn) -> list[str]:
    """Return the configuration of a turn as overrides of train.py."""
    return [
        *turn.shape.overrides(), "model.positions=rotary", "data.documents=separate",
        f"data.sequence_length={turn.shape.sequence * turn.ranks}",
        f"data.micro_batch={turn.samples}",
        f"data.global_batch={turn.samples * turn.micro_batches}",
        "parallel.pipeline=1", f"parallel.context={turn.ranks}", f"precision={turn.precision}",
        "sharding=zero1", f"collectives.grads_format={turn.precision}",
        f"optimizer.clip_norm={CLIP_NORM}", f"optimizer.epsilon={ADAMW['eps']}",
    ]  # fmt: skip


def _choose(contender: str) -> None:
    """Let this process cut samples and exchange keys and values as a contender does."""
    if contender == "context-documents":
        return
    setattr(HeadExchange, "pays", lambda *_, **__: contender == "context-heads")  # noqa: B010
    if contender == "context-heads":
        return
    by_documents = context_cut._chosen
    setattr(  # noqa: B010
        context_cut, "_chosen", lambda lengths, ranks: by_documents((sum(lengths),), ranks)
    )
    if contender == "context-gather":
        cut_samples.read_by = context_cut.read_by = _all


def _all(lengths: Sequence[int], ranges: Sequence[Range]) -> list[Range]:
    return [(0, sum(lengths))]


class Cut(Ours):
    """One rank of a contender."""

    def __init__(self, turn: Turn, rank: int) -> None:
        super().__init__(turn, overrides(turn))
        self._turn, self._rank, self._steps = turn, rank, 0
        count = (turn.warmup + turn.steps + 1) * turn.micro_batches * turn.samples
        tokens = turn.shape.sequence * turn.ranks
        self._documents = drawn_samples("web", count, tokens)

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step with the tokens of all ranks; return the mean loss."""
        of_ranks = [self._turn.batches(rank, self._steps) for rank in range(self._turn.ranks)]
        self._steps += 1
        return self._run([self._part(list(parts)) for parts in zip(*of_ranks, strict=True)])

    def _part(self, parts: list[MicroBatch]) -> Batch:
        """Join the tokens of all ranks to samples, and return the part of this rank."""
        tokens, labels = (torch.cat(of, dim=1) for of in zip(*parts, strict=True))
        documents = list(islice(self._documents, len(tokens)))
        most = max(map(len, documents))
        lengths = torch.tensor([[*row, *[0] * (most - len(row))] for row in documents])
        ends = lengths.cumsum(dim=1)
        at = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        table = torch.cat([torch.zeros_like(ends[:, :1]), ends], dim=1)
        first = table.gather(1, torch.searchsorted(ends, at, right=True))
        batch = Batch(tokens, labels, at - first, cumulative_lengths=table.int())
        return batch.part(self._turn.ranks, self._rank, "samples")
