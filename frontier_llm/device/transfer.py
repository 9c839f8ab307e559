"""Copies between host and device during which the host does not wait for the device.

Such a copy needs page-locked host memory, from which a GPU reads by itself. With pageable memory
torch waits until the stream has finished everything before the copy, and the copy.
"""

from collections.abc import Sequence

import torch


def send(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Copy numbers to a device as fp64, in the order of the current stream; returns at once."""
    is_gpu = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=is_gpu)
    return host.to(device, non_blocking=True)


class HostCopy:
    """A copy of a device tensor on the host, started at once and read later.

    Reading waits for the operations that were submitted to the current stream before the copy, but
    not for later ones: the device does them while the host waits. The tensor may be overwritten at
    once, by operations on the current stream. On a CPU the copy is made at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._done = None if stream is None else stream.record_event()

    def tolist(self) -> list[float]:
        """Wait for the copy and return its numbers."""
        if self._done is not None:
            self._done.synchronize()
        return list(self._copy.tolist())
