"""Run training steps of one rank on CUDA tensors without memory, and record what a GPU would do.

Tensors are torch's fake tensors: operations compute shapes, dtypes and devices, but no numbers.
The process group is torch's fake group. An operation that needs a number on the host, such as
`.item()`, raises an error. So a step that completes waits for the device only in the places that
are replaced here and counted.
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from frontier_llm.data.batch import AnyBatch, Batch, Seq2SeqBatch
from frontier_llm.device.kernels import resolve, use_deterministic_operations
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model import build
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import destroy_groups, make_groups
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep
from frontier_llm.trainer.totals import SCALARS, Totals
from tests.gpu_model import generated_code

DEVICE = torch.device("cuda", 0)
WITHOUT_KERNEL = ("prim.", "aten._unsafe_view", "aten.empty")
"""Operations that only allocate a tensor or change its description, beside views."""
OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_")
"""Operations that write a tensor without reading it."""
PRELOADED = os.environ.get("LD_PRELOAD", "").endswith("fake_cuda.so")
"""Whether the stand-in for CUDA is in place; `make test-gpu-model` sets it."""


@dataclass
class Recorded:
    """What one step would do on a GPU."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Operations on CUDA tensors that are not views, by name."""
    kernel_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that these operations read and write."""
    across_devices: Counter[str] = field(default_factory=Counter)
    """Operations with tensors on both the CPU and the GPU."""
    device_waits: int = 0
    """Calls that wait for all work of the device."""
    host_waits: int = 0
    """Places in which the host waits for a result of the device."""

    def clear(self) -> None:
        """Forget everything."""
        self.kernels.clear()
        self.kernel_bytes.clear()
        self.across_devices.clear()
        self.device_waits = self.host_waits = 0

    def start(self, name: str, size: float) -> None:
        """Record a kernel that reads and writes `size` bytes."""
        self.kernels[name] += 1
        self.kernel_bytes[name] += int(size)


class Recorder(TorchDispatchMode):
    """Records every operation within its context."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return true, because otherwise compiled functions would run uncompiled."""
        return True

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]
                         for x in ((args, kwargs), out))  # fmt: skip
        name = str(func)
        devices = {tensor.device.type for tensor in (*read, *written) if tensor.dim()}
        if len(devices) > 1:
            self._recorded.across_devices[name] += 1
        is_kernel = not func.is_view and not name.startswith(WITHOUT_KERNEL)
        if is_kernel and "cuda" in devices:
            changed = [tensor for tensor in written if any(tensor is other for other in read)]
            if not name.startswith(OVERWRITES):
                read += changed  # which would else count once
            new = [tensor for tensor in written if all(tensor is not other for other in changed)]
            sizes = [tensor.numel() * tensor.element_size() for tensor in (*read, *new)]
            self._recorded.start(name, sum(sizes))
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
        ):
            step = _make_step(config, world_size, rank, precision, kernels)
            for number in (1, 2):
                batches = _batches(config, step)
                recorded.clear()
                waits = _native_waits()
                with Recorder(recorded) if number == 2 else nullcontext():
                    step.run(number, batches, 1e-4)
                recorded.device_waits += _native_waits() - waits
    finally:
        destroy_groups()
        torch.use_deterministic_algorithms(False)
    return recorded


def _make_step(
    config: RunConfig, world_size: int, rank: int, precision: str, kernels: str
) -> TrainStep:
    per_node = min(config.launch.ranks_per_node or 8, world_size)
    groups = make_groups(config.parallel, per_node, 1)
    layout = ResolvedLayout.resolve(
        config, world_size, per_node, precision=precision, check_rules=False
    )
    model = build.build_model(layout, groups, DEVICE, resolve(kernels, DEVICE), 1)
    for chunk in model.chunks:
        assert all(parameter.is_cuda for parameter in chunk.parameters())
    traffic = Traffic(groups.grid, rank)
    states = shard(config, model, groups, traffic)
    step = TrainStep(model, states, groups, config, LossScale(config.precision, precision), traffic)
    step.timer = mock.Mock()  # it waits for the device on purpose, in the first steps
    return step


def _batches(config: RunConfig, step: TrainStep) -> list[AnyBatch]:
    data = config.data
    count = data.global_batch // step._groups.grid.data // data.micro_batch
    samples, tokens = data.micro_batch, data.sequence_length
    zeros = torch.zeros(samples, tokens, dtype=torch.int64)
    if config.model.kind == "t5":
        targets = torch.zeros(samples, tokens // 4, dtype=torch.int64)
        mask = torch.ones(samples, tokens, dtype=torch.bool)
        weights = torch.ones(samples, tokens // 4)
        batch: AnyBatch = Seq2SeqBatch(zeros, mask, targets, targets, weights)
    else:
        batch = Batch(zeros, zeros, torch.arange(tokens).repeat(samples, 1))
    return [batch.to(DEVICE) for _ in range(count)]


@contextmanager
def _simulated(config: RunConfig, recorded: Recorded) -> Iterator[None]:
    """Replace what needs numbers or a real device."""
    make_tensor = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> torch.Tensor:
        if device is None:
            return make_tensor(data, dtype=dtype, **more)
        return torch.zeros(np.shape(data), dtype=dtype or torch.float32, device=device)

    def totals(_: Totals, share: Any) -> Any:
        """All ranks finished the step. The host waits once for the sums."""
        recorded.host_waits += 1
        sums = dict.fromkeys(SCALARS, 1.0) | {"stop": 0.0, "checkpoint": 0.0}
        return sums | {"samples": float(config.data.global_batch)}, {}, {}

    def synchronize(*_: Any) -> None:
        recorded.device_waits += 1

    import megatron.core.pipeline_parallel.schedules  # noqa: F401
    import megatron.core.tensor_parallel.random as megatron_random

    substitutes = {"current_device": lambda: 0, "synchronize": synchronize}
    patches = [
        mock.patch.object(fake_tensor, "init_gpu_context"),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(nn.Module, "to", lambda self, **_: self),  # built on the device already
        mock.patch.object(build, "initialise"),
        mock.patch.object(Totals, "reduce", totals),
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
        if replacement.name != "torch"
    ]
    torch.cuda.init()
    torch._C._set_only_lift_cpu_tensors(True)
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _native_waits() -> int:
    """Return how often torch has called cudaDeviceSynchronize."""
    return ctypes.c_int.in_dll(ctypes.CDLL(None), "stub_device_waits").value
