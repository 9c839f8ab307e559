"""Read the micro-batches of a training step on one data-parallel replica.

A step reads the next `global_batch` samples of the run. Each replica reads its share of them in
micro-batches. The number of replicas and the size of a micro-batch do not change which samples a
step reads, so they change the gradient only by the order in which samples are summed. The batches
are copied to the device of the rank while the previous step computes.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from frontier_llm.data.batch import (
    Batch,
    digest,
    map_tensors,
    named_tensors,
    without_labels,
)

CPU = torch.device("cpu")
Tokens = npt.NDArray[np.int64]
MakeBatch = Callable[[Sequence[Any], Sequence[int]], Batch]
"""A function that builds a micro-batch from the windows of its samples and their indices in the
run. A window is an array of tokens, or a `Row` of documents (data/document_rows.py)."""


@dataclass(frozen=True)
class SentBatches:
    """Batches that are being copied to the device."""

    batches: list[Batch]
    """The batches on the device. They may be used after `BatchTransfer.receive`."""
    copied: torch.cuda.Event | None


class BatchTransfer:
    """Copies batches to a device; the host does not wait.

    A GPU reads page-locked host memory by itself. The copies run on a separate CUDA stream: on the
    stream of the step they would wait for the kernels that were submitted before, and the kernels
    that are submitted next would wait for them. On a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batches: Sequence[Batch]) -> SentBatches:
        """Start to copy batches of host memory, which may be freed at once, in any thread."""
        if self._stream is None:
            return SentBatches([batch.to(self._device) for batch in batches], None)
        # The current device of a new thread is GPU 0. Allocating page-locked memory or recording an
        # event would then create a context there.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            copies = [map_tensors(batch, self._send_tensor) for batch in batches]
        return SentBatches(copies, self._stream.record_event())

    def receive(self, sent: SentBatches) -> list[Batch]:
        """Return the batches. The current stream waits for the copies; the host does not."""
        if sent.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.copied)
            for batch in sent.batches:
                for _, tensor in named_tensors(batch):
                    # the memory belongs to the stream of the copies, which would reuse it for the
                    # next batches as soon as the tensor is freed on the host
                    tensor.record_stream(stream)
        return sent.batches

    def _send_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch keeps the page-locked memory until the copy is done, and then reuses it
        return tensor.pin_memory().to(self._device, non_blocking=True)


class Windows(Protocol):
    """The windows of a run. The window of a sample consists of the tokens that the sample reads."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""

    def __getitem__(self, index: int) -> Any:
        """Return the window of a sample."""


@dataclass(frozen=True)
class Reading:
    """How batches are read ahead."""

    device: torch.device = CPU
    workers: int = 1
    """Threads, which divide the micro-batches of a step."""
    steps: int = 1
    """Steps that are read ahead of the caller."""
    part: Callable[[Batch], Batch] = lambda batch: batch
    """Returns what this rank computes of a micro-batch."""


class StepSamples(NamedTuple):
    """The samples of a step on one replica."""

    micro_batches: list[Batch]
    digest: int


class BatchLoader:
    """Reads the micro-batches of a replica. Threads read some steps ahead of the caller.

    The threads also start to copy the micro-batches to the device, so that the copies overlap with
    the previous step. Which samples a step has, and their order, do not depend on the threads. A
    single thread must call all methods.

    With `ends` the samples have no second epoch. The last micro-batches then contain copies of
    sample 0 that predict nothing, and a step has only as many as are needed.
    """

    def __init__(
        self,
        samples: Windows,
        global_batch: int,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        make_batch: MakeBatch | None = None,
        reading: Reading | None = None,
        *,
        ends: bool = False,
    ) -> None:
        assert global_batch % (micro_batch * data_size) == 0, "checked in config/rules.py"
        self._samples, self._make_batch = samples, make_batch or causal_batch
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._data_rank, self._data_size = data_rank, data_size
        self._end = len(samples) if ends else None
        self._reading = reading or Reading()
        self._transfer = BatchTransfer(self._reading.device)
        self._threads = ThreadPoolExecutor(self._reading.workers, thread_name_prefix="batches")
        self._ahead: dict[int, list[Future[_Part]]] = {}  # by the first sample of a step

    def read_step(self, first: int) -> StepSamples:
        """Return this replica's samples of the step that begins with sample `first`.

        The method then starts to read the following steps in the background. A call for any other
        step than these has to wait for the disk. An error of a background thread is raised when its
        step is asked for, or is no longer one of the following steps. On a GPU the current stream
        waits for the copies to the device.
        """
        parts = self._take_ahead(first) or [self._read(self.sample_indices(first))]
        self._read_ahead(first)
        by_part = [self._transfer.receive(sent) for sent, _ in parts]
        rounds = itertools.zip_longest(*by_part)
        batches = [batch for batches in rounds for batch in batches if batch is not None]
        return StepSamples(batches, sum(part_digest for _, part_digest in parts))

    def micro_batches(self, first: int) -> list[Batch]:
        """Return the micro-batches of `read_step`."""
        return self.read_step(first).micro_batches

    def close(self) -> None:
        """End the background threads. The loader cannot be used afterwards."""
        self._ahead.clear()
        self._threads.shutdown(cancel_futures=True)

    def sample_indices(self, first: int) -> list[list[int]]:
        """Return the sample indices of each micro-batch of a step on this replica."""
        stop = first + self._global_batch
        if self._end is not None:
            stop = min(stop, self._end)
        # all replicas together read `stride` samples per micro-batch
        stride = self._data_size * self._micro_batch
        offset = self._data_rank * self._micro_batch
        return [
            list(range(start + offset, start + offset + self._micro_batch))
            for start in range(first, stop, stride)
        ]

    def _take_ahead(self, first: int) -> "list[_Part]":
        """Return what threads have read of a step, and drop steps that are not ahead."""
        ahead = range(first, first + (self._reading.steps + 1) * self._global_batch)
        stale = [step for step in self._ahead if step not in ahead[:: self._global_batch]]
        try:
            for step in stale:
                for future in self._ahead.pop(step):
                    if not future.cancel():
                        future.result()
            return [future.result() for future in self._ahead.pop(first, [])]
        except BaseException:
            self._ahead.clear()  # read again what an error may have spoiled
            raise

    def _read_ahead(self, first: int) -> None:
        """Let the threads read the steps that follow the one that begins with sample `first`."""
        workers = self._reading.workers
        for number in range(1, self._reading.steps + 1):
            step = first + number * self._global_batch
            if step not in self._ahead:
                batches = self.sample_indices(step)
                parts = [batches[part::workers] for part in range(min(workers, len(batches)))]
                self._ahead[step] = [self._threads.submit(self._read, part) for part in parts]

    def _read(self, batches_of_indices: Sequence[Sequence[int]]) -> "_Part":
        """Read micro-batches; return this rank's parts, on their way to the device, and a digest.

        The digest is that of whole samples, so it does not depend on the cut.
        """
        batches = [self._batch(indices) for indices in batches_of_indices]
        parts = [self._reading.part(batch) for batch in batches]
        return self._transfer.send(parts), digest(batches)

    def _batch(self, indices: Sequence[int]) -> Batch:
        read = [index for index in indices if self._end is None or index < self._end]
        copies = len(indices) - len(read)
        batch = self._make_batch([self._samples[index] for index in read + [0] * copies], indices)
        return without_labels(batch, copies) if copies else batch


_Part = tuple[SentBatches, int]
"""Some micro-batches of a step, and the sum of their digests."""


def causal_batch(rows: Sequence[Tokens], indices: Sequence[int]) -> Batch:
    """Build a micro-batch for next-token prediction.

    A window is [sequence_length + 1] int64: the inputs and one more token, so that each input has a
    label. Of the indices only the number is used.
    """
    stacked = torch.from_numpy(np.stack(rows))
    tokens = stacked[:, :-1].contiguous()
    positions = torch.arange(tokens.shape[1]).repeat(len(indices), 1)
    return Batch(tokens, stacked[:, 1:].contiguous(), positions)
