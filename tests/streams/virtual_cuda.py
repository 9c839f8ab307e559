"""The streams and events of torch.cuda, on a virtual device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch

from tests.streams.virtual_device import Event, Order, Stream, VirtualDevice, virtual_device


class CudaStream:
    """A stream with the interface of torch.cuda.Stream."""

    def __init__(self, device: VirtualDevice, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def wait_stream(self, other: "CudaStream") -> None:
        with self.device.on(self.stream):
            self.device.wait_for(other.stream.now())

    def wait_event(self, event: "CudaEvent") -> None:
        with self.device.on(self.stream):
            self.device.wait_for(event.reached)

    def record_event(self) -> "CudaEvent":
        event = CudaEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.synchronise(self.stream.now())


class CudaEvent:
    """An event with the interface of torch.cuda.Event."""

    reached: Event
    _device: VirtualDevice

    def record(self, stream: CudaStream) -> None:
        self.reached, self._device = stream.stream.now(), stream.device

    def synchronize(self) -> None:
        self._device.synchronise(self.reached)

    def query(self) -> bool:
        return self.reached.is_over


@contextmanager
def virtual_cuda(order: Order) -> Iterator[VirtualDevice]:
    """Return a context in which torch.cuda has the streams of a virtual device."""
    with virtual_device(order) as device:

        def on(stream: CudaStream) -> AbstractContextManager[None]:
            return device.on(stream.stream)

        with mock.patch.multiple(
            torch.cuda,
            Stream=lambda *_: CudaStream(device, device.make_stream()),
            Event=CudaEvent,
            stream=on,
            current_stream=lambda *_: CudaStream(device, device.current),
            set_device=lambda _: None,
        ):
            yield device
