"""Copies the batches of a step to the device of a rank, while the previous step computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from frontier_llm.data.batch import AnyBatch, map_tensors, named_tensors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SentBatches:
    """Batches that are being copied to the device."""

    batches: list[AnyBatch]
    """The batches on the device. They may be used after `BatchTransfer.receive`."""
    copied: torch.cuda.Event | None
    """Recorded after the last copy; None on a CPU."""


class BatchTransfer:
    """Copies batches to a device; the host does not wait.

    A GPU reads page-locked host memory by itself. The copies run on a separate CUDA stream: on the
    stream of the step they would wait for the kernels that were submitted before, and the kernels
    that are submitted next would wait for them. On a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batches: Sequence[AnyBatch]) -> SentBatches:
        """Start to copy batches of host memory, which may be freed at once, in any thread."""
        if self._stream is None:
            return SentBatches([batch.to(self._device) for batch in batches], None)
        # The current device of a new thread is GPU 0. Allocating page-locked memory or recording an
        # event would then create a context there.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            copies = [map_tensors(batch, self._send_tensor) for batch in batches]
        return SentBatches(copies, self._stream.record_event())

    def receive(self, sent: SentBatches) -> list[AnyBatch]:
        """Return the batches, for use on the current stream of this thread.

        The stream waits for the copies; the host does not.
        """
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
