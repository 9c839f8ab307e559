"""The micro-batches of a step on one replica.

A step reads samples [first, first + G) for a global batch of G, however they are dealt out; dealing
them out any other way changes no gradient but for the order of its sum.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.data.batch import AnyBatch, Batch

Tokens = npt.NDArray[np.int64]
MakeBatch = Callable[[Sequence[Tokens], Sequence[int]], AnyBatch]
"""From the windows of some samples, and their indices, to a micro-batch."""


class Windows(Protocol):
    """The text of each sample of a run."""

    def __len__(self) -> int:
        """Samples an epoch."""

    def __getitem__(self, index: int) -> Tokens:
        """Return the tokens of a sample."""


class BatchLoader:
    """Reads batches, one step ahead of the caller in a thread of its own.

    For one thread: `micro_batches` and `close` are not to be called at the same time.
    """

    def __init__(
        self,
        samples: Windows,
        global_batch: int,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        make_batch: MakeBatch | None = None,
    ) -> None:
        """Deal samples out.

        Args:
            samples: what all replicas read together.
            global_batch: samples a step, a multiple of `micro_batch * data_size`.
            micro_batch: samples a replica computes at once.
            data_rank: this replica.
            data_size: number of replicas.
            make_batch: lays a micro-batch out; None = `causal_batch`.
        """
        assert global_batch % (micro_batch * data_size) == 0, "checked in config/rules.py"
        self._samples, self._make_batch = samples, make_batch or causal_batch
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._data_rank, self._data_size = data_rank, data_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[AnyBatch]]] | None = None

    def micro_batches(self, first: int) -> list[AnyBatch]:
        """Return this replica's micro-batches of the step that begins with sample `first`.

        Begins to read those of the step that follows: only going on to that one is fast. What
        went wrong while reading ahead is raised here, also when another step is asked for.
        """
        batches = self._collect(first)
        if batches is None:
            batches = self._read(first)
        following = first + self._global_batch
        self._ahead = following, self._thread.submit(self._read, following)
        return batches

    def close(self) -> None:
        """End the thread; no step can be asked for any more."""
        self._ahead = None
        self._thread.shutdown(cancel_futures=True)

    def sample_indices(self, base: int) -> list[list[int]]:
        """Return which samples each micro-batch of a step holds on this replica.

        Args:
            base: the step's first sample.
        """
        stride = self._data_size * self._micro_batch
        offset = self._data_rank * self._micro_batch
        return [
            list(range(first + offset, first + offset + self._micro_batch))
            for first in range(base, base + self._global_batch, stride)
        ]

    def _collect(self, first: int) -> list[AnyBatch] | None:
        """Take what was read ahead, if it begins there."""
        if self._ahead is None:
            return None
        (read_first, future), self._ahead = self._ahead, None
        batches = future.result()
        return batches if read_first == first else None

    def _read(self, first: int) -> list[AnyBatch]:
        return [self._batch(indices) for indices in self.sample_indices(first)]

    def _batch(self, indices: list[int]) -> AnyBatch:
        return self._make_batch([self._samples[index] for index in indices], indices)


def causal_batch(rows: Sequence[Tokens], indices: Sequence[int]) -> Batch:
    """Lay out windows of text: each token is to say the next.

    Args:
        rows: [sequence_length + 1] int64 each.
        indices: of the samples; a text is the same whichever it is.
    """
    stacked = torch.from_numpy(np.stack(rows))
    tokens = stacked[:, :-1].contiguous()
    positions = torch.arange(tokens.shape[1]).repeat(len(indices), 1)
    return Batch(tokens, stacked[:, 1:].contiguous(), positions)
