"""Run training steps of one rank on CUDA tensors without memory, and record what a GPU would do.

Tensors are torch's fake tensors: operations compute shapes, dtypes and devices, but no numbers.
The process group is torch's fake group. An operation that needs a number on the host, such as
`.item()`, raises an error. Only the numbers that a step reads after its all-reduce are replaced
here. Waits of the host are counted by the stand-in for CUDA.
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frontier_llm.cli.compose import compose
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.batch import Batch
from frontier_llm.device import accumulate
from frontier_llm.device.kernels import resolve, use_deterministic_operations
from frontier_llm.device.transfer import HostCopy
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model import build
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import destroy_groups, make_groups
from frontier_llm.trainer.progress import LossScale
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep
from frontier_llm.trainer.step_result import SCALARS
from tests.gpu_model import generated_code

DEVICE = torch.device("cuda", 0)
WITHOUT_KERNEL = ("prim.", "aten._unsafe_view", "aten.empty")
"""Operations that only allocate a tensor or change its description, beside views."""
OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_")
"""Operations that write a tensor without reading it."""
COPIES = ("aten._to_copy.default", "aten.copy_.default")
"""Operations that may copy between host and device."""
WAITS = ("device_waits", "event_waits", "stream_waits")
"""Counters of cuda_stub.c."""
PRELOADED = os.environ.get("LD_PRELOAD", "").endswith("fake_cuda.so")
"""Whether the stand-in for CUDA is in place; `make test-gpu-model` sets it."""


@dataclass
class Recorded:
    """What one step would do on a GPU."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Operations on CUDA tensors that are not views, by name."""
    kernel_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that these operations read and write."""
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of the tensors that these operations return."""
    across_devices: Counter[str] = field(default_factory=Counter)
    """Operations with tensors on both the CPU and the GPU that are not copies between them."""
    copies: int = 0
    """Copies between host and device."""
    blocking_copies: int = 0
    """Copies for which the host waits: from or to pageable memory, or not asynchronous."""
    device_waits: int = 0
    """Calls that wait for all work of the device."""
    host_waits: int = 0
    """Calls that wait for an event or a stream."""
    kernels_before_wait: Counter[str] = field(default_factory=Counter)
    """The operations on CUDA tensors that the host submits before it reads the numbers."""

    def clear(self) -> None:
        """Forget everything."""
        self.kernels.clear()
        self.kernel_bytes.clear()
        self.across_devices.clear()
        self.kernels_before_wait.clear()
        self.shapes.clear()
        self.copies = self.blocking_copies = self.device_waits = self.host_waits = 0

    def start(self, name: str, size: float) -> None:
        """Record a kernel that reads and writes `size` bytes."""
        self.kernels[name] += 1
        self.kernel_bytes[name] += int(size)


class _Mode(TorchDispatchMode):
    """A mode below which functions can be compiled and FlexAttention is allowed."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return true, because otherwise compiled functions would run uncompiled."""
        return True


class ProductsIntoFp32(_Mode):
    """Replaces the product of bf16 factors that is added to an fp32 sum; it computes no numbers.

    torch's own replacement of this operation on fake tensors raises a TypeError (torch 2.12).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.addmm.dtype_out:
            return func(*args, **(kwargs or {}))
        total, left, right, dtype = args
        assert total is kwargs["out"]
        assert total.dtype == dtype == torch.float32
        assert left.dtype == right.dtype
        assert (*left.shape[:1], *right.shape[1:]) == total.shape
        assert left.shape[1] == right.shape[0]
        return total


class Recorder(_Mode):
    """Records every operation within its context, FlexAttention with the tensors of its kernels."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]
                         for x in ((args, kwargs), out))  # fmt: skip
        name = str(func)
        for tensor in written if (kwargs or {}).get("pin_memory") else ():
            tensor.is_page_locked = True
        devices = {tensor.device.type for tensor in (*read, *written) if tensor.dim()}
        if name in COPIES and len({tensor.device.type for tensor in (*read, *written)}) > 1:
            hosts = [tensor for tensor in (*read, *written) if tensor.device.type == "cpu"]
            is_asynchronous = args[2:] == (True,) or (kwargs or {}).get("non_blocking", False)
            is_page_locked = all(getattr(host, "is_page_locked", False) for host in hosts)
            self._recorded.copies += 1
            self._recorded.blocking_copies += not (is_asynchronous and is_page_locked)
        elif len(devices) > 1:
            self._recorded.across_devices[name] += 1
        is_kernel = not getattr(func, "is_view", False) and not name.startswith(WITHOUT_KERNEL)
        if is_kernel and "cuda" in devices:
            changed = [tensor for tensor in written if any(tensor is other for other in read)]
            if not name.startswith(OVERWRITES):
                read += changed  # which would else count once
            new = [tensor for tensor in written if all(tensor is not other for other in changed)]
            sizes = [tensor.numel() * tensor.element_size() for tensor in (*read, *new)]
            self._recorded.start(name, sum(sizes))
            self._recorded.shapes |= {tuple(tensor.shape) for tensor in new}
        return out


def record_step(
    overrides: Sequence[str],
    world_size: int,
    rank: int,
    precision: str = "bf16",
    kernels: str = "torch",
) -> Recorded:
    """Record the second training step of one rank; `kernels` is the key of the configuration."""
    config = decode(compose(["plan=off", *overrides]))
    if config.trainer.deterministic:
        use_deterministic_operations()
    recorded = Recorded()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            _simulated(config, recorded),
            generated_code.recording(recorded.start),
            FakeTensorMode(allow_non_fake_inputs=True),
            ProductsIntoFp32(),
        ):
            step = _make_step(config, world_size, rank, precision, kernels)
            for number in (1, 2):
                batches = _batches(config, step)
                recorded.clear()
                waits = [stub_count(name) for name in WAITS]
                with Recorder(recorded) if number == 2 else nullcontext():
                    step.run(number, batches, 1e-4)
                new = [stub_count(name) - n for name, n in zip(WAITS, waits, strict=True)]
                recorded.device_waits += new[0]
                recorded.host_waits = sum(new[1:])
    finally:
        destroy_groups()
        torch.use_deterministic_algorithms(False)
    return recorded


def _make_step(
    config: RunConfig, world_size: int, rank: int, precision: str, kernels: str
) -> TrainStep:
    per_node = min(config.launch.ranks_per_node or 8, world_size)
    layout = ResolvedLayout.resolve(
        config, world_size, per_node, precision=precision, check_rules=False
    )
    groups = make_groups(layout.grid, layout.head_stage)
    model = build.build_model(layout, groups, DEVICE, resolve(kernels, DEVICE), 1)
    for chunk in model.chunks:
        assert all(parameter.is_cuda for parameter in chunk.parameters())
    traffic = Traffic(groups.grid, rank)
    states = shard(config, model, groups, traffic)
    step = TrainStep(model, states, groups, config, LossScale(config.precision, precision), traffic)
    step.timer = mock.Mock()  # it waits for the device on purpose, in the first steps
    return step


def _batches(config: RunConfig, step: TrainStep) -> list[Batch]:
    data = config.data
    count = data.global_batch // step._groups.grid.data // data.micro_batch
    samples, tokens = data.micro_batch, data.sequence_length
    zeros = torch.zeros(samples, tokens, dtype=torch.int64)
    if config.model.kind == "t5":
        targets = torch.zeros(samples, tokens // 4, dtype=torch.int64)
        mask = torch.ones(samples, tokens, dtype=torch.bool)
        weights = torch.ones(samples, tokens // 4)
        batch = Batch(targets, targets, None, weights, encoder_tokens=zeros, encoder_mask=mask)
    else:
        batch = Batch(zeros, zeros, torch.arange(tokens).repeat(samples, 1))
    return [batch.to(DEVICE) for _ in range(count)]


@contextmanager
def _simulated(config: RunConfig, recorded: Recorded) -> Iterator[None]:
    """Replace what needs numbers or a real device."""
    make_tensor = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> torch.Tensor:
        if device is None:
            made = make_tensor(data, dtype=dtype, **more)
            made.is_page_locked = more.get("pin_memory", False)
            return made
        recorded.copies += 1
        recorded.blocking_copies += 1
        return torch.zeros(np.shape(data), dtype=dtype or torch.float32, device=device)

    def numbers(copy: HostCopy) -> list[float]:
        """Wait, then return that all ranks finished the step and that it was not skipped."""
        assert copy._done is not None
        copy._done.synchronize()
        recorded.kernels_before_wait = Counter(recorded.kernels)
        sums = dict.fromkeys(SCALARS, 0.0) | {
            "samples": float(config.data.global_batch), "ranks": float(dist.get_world_size()),
            "weight": float(config.data.global_batch),
        }  # fmt: skip
        return [0.0, *sums.values(), *[0.0] * (len(copy._copy) - 1 - len(sums))]

    def synchronize(*_: Any) -> None:
        recorded.device_waits += 1

    import megatron.core.tensor_parallel.random as megatron_random

    substitutes = {
        "current_device": lambda: 0,
        "current_stream": torch.cuda.current_stream,
    }
    patches = [
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        mock.patch.object(fake_tensor, "init_gpu_context"),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(nn.Module, "to", lambda self, **_: self),  # built on the device already
        mock.patch.object(build, "initialise"),
        mock.patch.object(accumulate, "accumulates_in_fp32", return_value=True),
        mock.patch.object(HostCopy, "tolist", numbers),
        mock.patch.object(
            megatron_random.CudaRNGStatesTracker, "fork", side_effect=lambda *_: nullcontext()
        ),
    ]
    patches += [
        mock.patch.object(
            sys.modules[replacement.module],
            replacement.name,
            substitutes.get(replacement.name, replacement.substitute),
        )
        for replacement in megatron_cpu.REPLACEMENTS
    ]
    torch.cuda.init()
    torch._C._set_only_lift_cpu_tensors(True)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def stub_count(name: str) -> int:
    """Return a counter of cuda_stub.c, such as `device_waits`."""
    return ctypes.c_int.in_dll(ctypes.CDLL(None), f"stub_{name}").value
