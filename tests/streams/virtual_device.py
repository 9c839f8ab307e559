"""A device that exists only as streams of delayed operations on real CPU tensors.

On a GPU the host only launches operations. They run later, in the order of their stream, and
streams are ordered only by events. A missing wait therefore often goes unnoticed on a GPU, and
always on a CPU. Within the context of a `VirtualDevice`, each operation on tensors is put into the
queue of the current stream, each collective into the queue of its process group, and an operation
runs when the host waits for it. Between waits, an `Order` chooses among the orders that the events
allow. Memory is filled with ones (NaN in every floating-point format) when it is allocated and when
it is freed. So a computation that relies on an order which no wait enforces gives wrong numbers.

What is modelled: the compute stream, one stream per process group, as in NCCL, further streams that
the program makes, and a host that can launch only so much ahead.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from frontier_llm.collectives.slots import BufferPool
from frontier_llm.parallel.lanes import BATCH, call_sites
from tests.parallel.device_model import LAUNCH_LIMIT


class Order(Enum):
    """When operations run that are not on the compute stream; compute itself runs late."""

    LATE = "late"
    """When something waits for them."""
    EARLY = "early"
    """As soon as their own waits are over, before the compute stream goes on."""
    MIXED = "mixed"
    """Some late, some early."""
    AFTER = "after"
    """Late; operations that nothing waits for run at the end of the host's next wait."""


@dataclass(frozen=True)
class Event:
    """A position in a stream: the first `count` operations have run."""

    stream: "Stream"
    count: int

    @property
    def is_over(self) -> bool:
        return self.stream.finished >= self.count


class Stream:
    """Operations that run one after the other; an operation may be a wait for another stream."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[[], None] | Event, bool]] = deque()
        self.launched = self.finished = 0

    def now(self) -> Event:
        """Return the event after everything that has been launched."""
        return Event(self, self.launched)

    def append(self, item: Callable[[], None] | Event, early: bool = False) -> Event:
        """Launch an operation, or a wait for an event."""
        self.queue.append((item, early))
        self.launched += 1
        return self.now()


class VirtualDevice:
    """The streams of one rank, and the order in which their operations run.

    Every rank of a test must use the same order: collectives then run in the same order everywhere.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.compute = Stream()
        self._streams = [self.compute]
        self._by_group: dict[dist.ProcessGroup, Stream] = {}
        self._lock = threading.RLock()
        self._current = threading.local()
        self._collectives = 0
        self.ran: list[tuple[int, dist.ProcessGroup]] = []
        """The collectives that have run, by the number of their launch."""
        self._freed: dict[int, torch.UntypedStorage] = {}  # by the host
        self._invalid: set[int] = set()  # addresses that the operations so far have freed

    def make_stream(self) -> Stream:
        """Make another stream."""
        with self._lock:
            self._streams.append(Stream())
            return self._streams[-1]

    @property
    def current(self) -> Stream:
        """The stream on which this thread launches operations."""
        found: Stream = getattr(self._current, "stream", self.compute)
        return found

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Return a context in which this thread launches on another stream."""
        previous, self._current.stream = self.current, stream
        try:
            with _Launch(self):
                yield
        finally:
            self._current.stream = previous

    def launch(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Launch an operation on the current stream."""
        with self._lock:
            early = self.current is not self.compute and self._is_early(self.current.launched)
            self.current.append(partial(self._run, operation, *args, **kwargs), early)
            self._make_room()

    def wait_for(self, event: Event) -> None:
        """Make the current stream wait."""
        with self._lock:
            self.current.append(event, True)

    def synchronise(self, event: Event | None = None) -> None:
        """Make the host wait, for everything on the current stream if `event` is None."""
        with self._lock:
            self._run_early()
            self._run_until(event or self.current.now())
            if self._order is Order.AFTER:
                for stream in self._streams:
                    if stream is not self.compute:
                        self._run_early(stream, all_operations=True)

    def finish(self) -> None:
        """Run everything that was launched."""
        with self._lock:
            for stream in self._streams:
                self._run_until(stream.now())

    def collective(
        self, operation: Callable[..., Any], *tensors: torch.Tensor, group: dist.ProcessGroup
    ) -> "_Work":
        """Launch a collective on the stream of its group, after all work of the current stream."""
        with self._lock:
            if group not in self._by_group:
                self._by_group[group] = self.make_stream()
            stream, self._collectives = self._by_group[group], self._collectives + 1
            stream.append(self.current.now(), True)
            run = partial(self._run_collective, self._collectives, operation, *tensors, group=group)
            work = _Work(self, stream.append(run, self._is_early(self._collectives)))
            self._make_room()
            return work

    def _run_collective(self, number: int, *args: Any, group: dist.ProcessGroup) -> None:
        self.ran.append((number, group))
        self._run(*args, group=group)

    def _make_room(self) -> None:
        """Let the host wait while it has launched too much."""
        while sum(stream.launched - stream.finished for stream in self._streams) > LAUNCH_LIMIT:
            self._run_until(Event(self.compute, self.compute.finished + 1))

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Allocate or free the memory of a storage, as the current stream's allocator does."""
        if size > storage.size():
            _resize(storage, size)
        address = storage.data_ptr()
        self._freed.pop(address, None)
        if size == 0:
            self._freed[address] = storage
            self.launch(self._invalid.add, address)
        else:
            self.launch(self._invalid.discard, address)
            self.launch(_poison, storage)

    def release_freed(self) -> None:
        """Free the memory that the program has freed, and that pending operations needed."""
        for storage in self._freed.values():
            _resize(storage, 0)

    def _run(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run an operation below autograd, which has seen it when it was launched."""
        if self._invalid:
            with torch._C.DisableTorchFunctionSubclass():  # guards only concern the host
                used = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
            assert not used & self._invalid, f"{operation} uses memory that is free"
        inplace = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunctionSubclass(),
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._ExcludeDispatchKeyGuard(inplace),
        ):
            operation(*args, **kwargs)

    def _is_early(self, number: int) -> bool:
        mixed = self._order is Order.MIXED and number * 0x9E3779B1 >> 5 & 1 == 0
        return self._order is Order.EARLY or mixed

    def _run_until(self, event: Event) -> None:
        while not event.is_over:
            self._run_first(event.stream)
            self._run_early()

    def _run_first(self, stream: Stream) -> None:
        item, _ = stream.queue[0]
        if isinstance(item, Event):
            self._run_until(item)
            if not stream.queue or stream.queue[0][0] is not item:
                return  # run meanwhile
        stream.queue.popleft()
        stream.finished += 1
        if not isinstance(item, Event):
            item()

    def _run_early(self, only: Stream | None = None, *, all_operations: bool = False) -> None:
        """Run the operations of other streams that may run now and are early."""
        for stream in [only] if only else self._streams:
            while stream is not self.compute and stream.queue:
                item, early = stream.queue[0]
                if not (item.is_over if isinstance(item, Event) else early or all_operations):
                    break
                self._run_first(stream)


@dataclass(frozen=True)
class _Work:
    """A collective under way, as torch.distributed returns it on a GPU."""

    device: VirtualDevice
    event: Event

    def wait(self) -> None:
        """Make the current stream wait; the host goes on."""
        self.device.wait_for(self.event)

    def is_completed(self) -> bool:
        return self.event.is_over


class _Launch(TorchDispatchMode):
    """Launches the operations of a thread instead of running them."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func.name().startswith(("aten::empty", "aten::new_empty")):
            out = func(*args, **kwargs)
            _poison(out.untyped_storage())
            return out
        written = _written(func, args, kwargs)
        if not written and _needs_host(func):
            self._device.synchronise()
            return func(*args, **kwargs)
        args = [  # as they are now
            [_alias(item) for item in arg] if isinstance(arg, list) else _alias(arg) for arg in args
        ]
        if written:
            self._device.launch(func, *args, **kwargs)
            return _as_returned(func, written)
        out = _allocate_result(func, args, kwargs)
        self._device.launch(_compute_into, out, func, args, kwargs)
        return out


@contextlib.contextmanager
def virtual_device(order: Order) -> Iterator[VirtualDevice]:
    """Return a context in which this thread's operations run on a virtual device."""
    device = VirtualDevice(order)
    tolist, give_back = torch.Tensor.tolist, BufferPool.give_back

    def read(tensor: torch.Tensor) -> Any:
        device.synchronise()
        return tolist(tensor)

    def poison_and_give_back(pool: BufferPool, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().data_ptr() in pool._lent:
            device.launch(_poison, tensor.untyped_storage())
        give_back(pool, tensor)

    with (
        mock.patch.object(torch.Tensor, "tolist", read),
        mock.patch.object(torch.UntypedStorage, "resize_", lambda *args: device.resize(*args)),
        mock.patch.object(BufferPool, "give_back", poison_and_give_back),
        contextlib.ExitStack() as stack,
        _Launch(device),
    ):
        for module, name, function in list(call_sites()):
            launched = _launched(device, function, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, launched))
        yield device
        with _disable_current_modes():
            device.finish()
    device.release_freed()


def _launched(device: VirtualDevice, name: str, original: Any) -> Callable[..., Any]:
    """Return a function of torch.distributed that runs on the stream of its group."""

    def collective(
        *tensors: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> _Work | None:
        call = partial(original, **options)
        work = device.collective(call, *tensors, group=group or dist.group.WORLD)
        if async_op:
            return work
        work.wait()
        return None

    def batch(operations: Sequence[dist.P2POp]) -> list[_Work]:
        tensors = [operation.tensor for operation in operations]

        def exchange(*_: torch.Tensor, group: dist.ProcessGroup) -> None:
            for work in original(operations):
                work.wait()

        return [device.collective(exchange, *tensors, group=operations[0].group)]

    return batch if name == BATCH else collective


_resize = torch.UntypedStorage.resize_


def _needs_host(func: Any) -> bool:
    """Whether the host needs values of the device to know the result or its shape."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    tags.add(torch.Tag.nondeterministic_seeded)  # the generator of a CPU belongs to the host
    gives_tensors = any("Tensor" in str(value.type) for value in func._schema.returns)
    return func.namespace != "aten" or not gives_tensors or bool(tags & set(func.tags))


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    if func not in _written_places:
        _written_places[func] = [
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    return [
        args[place] if place < len(args) else kwargs[name]
        for place, name in _written_places[func]
        if place < len(args) or name in kwargs
    ]


_written_places: dict[Any, list[tuple[int, str]]] = {}
"""Positions and names of the arguments that an operation writes to."""


def _as_returned(func: Any, written: list[Any]) -> Any:
    """Return what an operation returns that writes to its arguments."""
    returned = written[: len(func._schema.returns)]
    if len(returned) == len(func._schema.returns) and len(returned) <= 1:
        return returned[0] if returned else None
    assert len(returned) == len(func._schema.returns), func
    return tuple(returned)


def _allocate_result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return tensors like the results of an operation, filled with ones.

    Their layouts are found by running the operation once on zeros, which are valid as indices.
    """
    layouts = _layouts(args)
    key = (func, layouts, tuple(kwargs.items()))
    if key not in _result_layouts:
        _result_layouts[key] = _layouts(func(*_map(_Layout, _zeros, layouts), **kwargs))
    return _map(_Layout, _empty, _result_layouts[key])


class _Layout(NamedTuple):
    """Describes the memory of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


_result_layouts: dict[Any, Any] = {}
"""Layouts of the results of an operation, by the operation and the layouts of its arguments."""


def _layouts(value: Any) -> Any:
    """Return arguments or results with layouts instead of tensors."""
    return _map(torch.Tensor, lambda x: _Layout(tuple(x.shape), x.stride(), x.dtype), value)


def _map(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each object of a kind, in tuples and lists (which become tuples)."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)) and not isinstance(value, (_Layout, torch.Size)):
        return tuple(_map(kind, function, item) for item in value)
    return tuple(value) if isinstance(value, torch.Size) else value


def _alias(value: Any) -> Any:
    """Return the memory that a parameter has now: it may get another one later."""
    if not isinstance(value, torch.nn.Parameter):
        return value
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        return value.detach()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _empty(layout: _Layout) -> torch.Tensor:
    tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
    _poison(tensor.untyped_storage())
    return tensor


def _zeros(layout: _Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype).zero_()


def _compute_into(out: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for target, result in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
        target.copy_(result)


def _poison(storage: torch.UntypedStorage) -> None:
    """Set all bits: NaN in every floating-point format."""
    if storage.size():
        _as_bytes(storage).fill_(255)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
