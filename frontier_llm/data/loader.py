"""The micro-batches of a step on one replica.

Step k reads samples [kG, kG + G) for a global batch of G, however they are dealt out; dealing
them out any other way changes no gradient but for the order of its sum.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from frontier_llm.data.batch import Batch
from frontier_llm.data.datasets import Samples


class BatchLoader:
    """Reads batches, one step ahead of the caller in a thread of its own.

    For one thread: `micro_batches` and `close` are not to be called at the same time.
    """

    def __init__(
        self, samples: Samples, global_batch: int, micro_batch: int, data_rank: int, data_size: int
    ) -> None:
        """Deal samples out.

        Args:
            samples: what all replicas read together.
            global_batch: samples a step, a multiple of `micro_batch * data_size`.
            micro_batch: samples a replica computes at once.
            data_rank: this replica.
            data_size: number of replicas.
        """
        assert global_batch % (micro_batch * data_size) == 0, "checked in config/rules.py"
        self._samples = samples
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._data_rank, self._data_size = data_rank, data_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this replica's micro-batches of a step, and begin to read those of the next.

        Any step may be asked for; only going on to the next one is fast. What went wrong while
        reading ahead is raised here, also when another step is asked for.
        """
        batches = self._collect(step)
        if batches is None:
            batches = self._read(step)
        self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        return batches

    def close(self) -> None:
        """End the thread; no step can be asked for any more."""
        self._ahead = None
        self._thread.shutdown(cancel_futures=True)

    def sample_indices(self, step: int) -> list[list[int]]:
        """Return which samples each micro-batch of a step holds on this replica."""
        base = step * self._global_batch
        stride = self._data_size * self._micro_batch
        offset = self._data_rank * self._micro_batch
        return [
            list(range(first + offset, first + offset + self._micro_batch))
            for first in range(base, base + self._global_batch, stride)
        ]

    def _collect(self, step: int) -> list[Batch] | None:
        """Take what was read ahead, if it is this step."""
        if self._ahead is None:
            return None
        (read_step, future), self._ahead = self._ahead, None
        batches = future.result()
        return batches if read_step == step else None

    def _read(self, step: int) -> list[Batch]:
        return [self._batch(indices) for indices in self.sample_indices(step)]

    def _batch(self, indices: list[int]) -> Batch:
        rows = torch.from_numpy(np.stack([self._samples[index] for index in indices]))
        tokens = rows[:, :-1].contiguous()
        positions = torch.arange(tokens.shape[1]).repeat(len(indices), 1)
        return Batch(tokens, rows[:, 1:].contiguous(), positions)
