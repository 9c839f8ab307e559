"""Read the micro-batches of a step on one replica.

A step with global batch G reads samples [first, first + G), however they are distributed over
replicas and micro-batches. The distribution changes a gradient only by the order of its sum.
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
"""Builds a micro-batch from the windows and the indices of its samples."""


class Windows(Protocol):
    """The tokens of each sample of a run."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""

    def __getitem__(self, index: int) -> Tokens:
        """Return the tokens of a sample."""


class BatchLoader:
    """Reads the micro-batches of a replica, one step ahead of the caller in a thread.

    Not thread-safe: one thread calls all methods.
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
        """Initialise the loader; nothing is read yet.

        Args:
            samples: samples of the run, the same for all replicas.
            global_batch: samples per step, a multiple of `micro_batch * data_size`.
            micro_batch: samples per micro-batch.
            data_rank: index of this replica.
            data_size: number of replicas.
            make_batch: function that builds a micro-batch; None: `causal_batch`.
        """
        assert global_batch % (micro_batch * data_size) == 0, "checked in config/rules.py"
        self._samples, self._make_batch = samples, make_batch or causal_batch
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._data_rank, self._data_size = data_rank, data_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[AnyBatch]]] | None = None

    def micro_batches(self, first: int) -> list[AnyBatch]:
        """Return this replica's micro-batches of the step that begins with sample `first`.

        Starts to read the following step in the background, so only consecutive steps are fast. An
        error of the background thread is raised by the next call, whichever step that asks for.
        """
        batches = self._collect(first)
        if batches is None:
            batches = self._read(first)
        following = first + self._global_batch
        self._ahead = following, self._thread.submit(self._read, following)
        return batches

    def close(self) -> None:
        """End the background thread. The loader cannot be used afterwards."""
        self._ahead = None
        self._thread.shutdown(cancel_futures=True)

    def sample_indices(self, base: int) -> list[list[int]]:
        """Return the sample indices of each micro-batch of a step on this replica.

        Args:
            base: first sample of the step.
        """
        stride = self._data_size * self._micro_batch
        offset = self._data_rank * self._micro_batch
        return [
            list(range(first + offset, first + offset + self._micro_batch))
            for first in range(base, base + self._global_batch, stride)
        ]

    def _collect(self, first: int) -> list[AnyBatch] | None:
        """Return the batches that were read ahead, if they begin with sample `first`."""
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
    """Build a micro-batch for next-token prediction.

    Args:
        rows: windows, [sequence_length + 1] int64 each.
        indices: indices of the samples; only their number is used.
    """
    stacked = torch.from_numpy(np.stack(rows))
    tokens = stacked[:, :-1].contiguous()
    positions = torch.arange(tokens.shape[1]).repeat(len(indices), 1)
    return Batch(tokens, stacked[:, 1:].contiguous(), positions)
