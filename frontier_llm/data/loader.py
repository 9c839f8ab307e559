"""Read the micro-batches of a training step on one data-parallel replica.

A step reads the next `global_batch` samples of the run. Each replica reads its share of them in
micro-batches. The number of replicas and the size of a micro-batch do not change which samples a
step reads, so they change the gradient only by the order in which samples are summed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.data.batch import AnyBatch, Batch, digest
from frontier_llm.data.batch_transfer import CPU, BatchTransfer, SentBatches

Tokens = npt.NDArray[np.int64]
MakeBatch = Callable[[Sequence[Tokens], Sequence[int]], AnyBatch]
"""A function that builds a micro-batch from the windows (tokens) of its samples and their
indices in the run."""


class Windows(Protocol):
    """The windows of a run. The window of a sample is the range of tokens that the sample reads."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""

    def __getitem__(self, index: int) -> Tokens:
        """Return the tokens of a sample."""


class StepSamples(NamedTuple):
    """The samples of a step on one replica."""

    micro_batches: list[AnyBatch]
    """The micro-batches, on the device of the loader."""
    digest: int
    """Their digest (data/batch.py)."""


class BatchLoader:
    """Reads the micro-batches of a replica. A thread reads one step ahead of the caller.

    The thread also starts to copy the micro-batches to the device, so that the copies overlap with
    the previous step.

    The class is not thread-safe: a single thread must call all methods.
    """

    def __init__(
        self,
        samples: Windows,
        global_batch: int,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        make_batch: MakeBatch | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Initialise the loader; nothing is read yet.

        Args:
            samples: windows of all samples of the run, the same on all replicas.
            global_batch: samples per step, a multiple of `micro_batch * data_size`.
            micro_batch: samples per micro-batch.
            data_rank: index of this replica.
            data_size: number of replicas.
            make_batch: function that builds a micro-batch; None: `causal_batch`.
            device: where the micro-batches are needed.
        """
        assert global_batch % (micro_batch * data_size) == 0, "checked in config/rules.py"
        self._samples, self._make_batch = samples, make_batch or causal_batch
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._data_rank, self._data_size = data_rank, data_size
        self._transfer = BatchTransfer(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[tuple[SentBatches, int]]] | None = None

    def read_step(self, first: int) -> StepSamples:
        """Return this replica's samples of the step that begins with sample `first`.

        The method then starts to read the following step in the background. A call for any other
        step than the following one has to wait for the disk. An error of the background thread is
        raised by the next call. On a GPU the current stream waits for the copies to the device.
        """
        sent, sum_of_digests = self._take_ahead(first) or self._read(first)
        following = first + self._global_batch
        self._ahead = following, self._thread.submit(self._read, following)
        return StepSamples(self._transfer.receive(sent), sum_of_digests)

    def micro_batches(self, first: int) -> list[AnyBatch]:
        """Return the micro-batches of `read_step`."""
        return self.read_step(first).micro_batches

    def close(self) -> None:
        """End the background thread. The loader cannot be used afterwards."""
        self._ahead = None
        self._thread.shutdown(cancel_futures=True)

    def sample_indices(self, first: int) -> list[list[int]]:
        """Return the sample indices of each micro-batch of a step on this replica.

        Args:
            first: index of the first sample of the step.
        """
        # all replicas together read `stride` samples per micro-batch
        stride = self._data_size * self._micro_batch
        offset = self._data_rank * self._micro_batch
        return [
            list(range(start + offset, start + offset + self._micro_batch))
            for start in range(first, first + self._global_batch, stride)
        ]

    def _take_ahead(self, first: int) -> tuple[SentBatches, int] | None:
        """Return the result of `_read` in the thread, or None if it belongs to another step."""
        if self._ahead is None:
            return None
        (ahead_first, future), self._ahead = self._ahead, None
        read_ahead = future.result()
        return read_ahead if ahead_first == first else None

    def _read(self, first: int) -> tuple[SentBatches, int]:
        """Read the step that begins with sample `first`; return its batches and their digest."""
        batches = [
            self._make_batch([self._samples[index] for index in indices], indices)
            for indices in self.sample_indices(first)
        ]
        return self._transfer.send(batches), digest(batches)


def causal_batch(rows: Sequence[Tokens], indices: Sequence[int]) -> Batch:
    """Build a micro-batch for next-token prediction.

    Args:
        rows: window of each sample, [sequence_length + 1] int64: the inputs and one more token, so
            that each input has a label.
        indices: indices of the samples; only their number is used.
    """
    stacked = torch.from_numpy(np.stack(rows))
    tokens = stacked[:, :-1].contiguous()
    positions = torch.arange(tokens.shape[1]).repeat(len(indices), 1)
    return Batch(tokens, stacked[:, 1:].contiguous(), positions)
