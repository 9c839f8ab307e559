"""megatron-core on a CPU: the one place that replaces names in other libraries.

megatron-core 0.16.1 writes `cuda` where it means "the device of this rank". On a machine without a
GPU each of those names is given a meaning here; and groups that cost nothing with NCCL until they
are used are shared with gloo. With a GPU nothing is replaced.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _CpuStream:
    """Stands for a CUDA stream: everything on a CPU is already in order."""

    def wait_stream(self, other: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class _TorchOnCpu:
    """The torch module as schedules.py sees it: `device="cuda"` means the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        """As `torch.zeros`."""
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return torch.zeros(*size, **options)


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: object, **__: object) -> None:
    return None


def _get_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


@dataclass(frozen=True)
class Replacement:
    """One name that means something else on a CPU."""

    module: str
    name: str
    substitute: Callable[..., Any] | object
    reason: str


_RANDOM = "megatron.core.tensor_parallel.random"

REPLACEMENTS = (
    Replacement("torch.cuda", "current_device", _cpu_device, "buffers are allocated on it"),
    Replacement("torch.cuda", "synchronize", _nothing, "point-to-point sends wait on it"),
    Replacement("torch.cuda", "empty_cache", _nothing, "called between phases"),
    Replacement("torch.cuda", "current_stream", _CpuStream, "side streams join it"),
    Replacement(
        "torch.cuda", "manual_seed", torch.manual_seed, "the dropout tracker seeds with it"
    ),
    Replacement("torch.cuda", "get_rng_state", _get_state, "the dropout tracker keeps states"),
    Replacement("torch.cuda", "set_rng_state", _set_state, "the dropout tracker sets states"),
    Replacement(_RANDOM, "_get_cuda_rng_state", _get_state, "recomputation replays dropout"),
    Replacement(_RANDOM, "_set_cuda_rng_state", _set_state, "recomputation replays dropout"),
    Replacement(
        "megatron.core.pipeline_parallel.schedules",
        "torch",
        _TorchOnCpu(),
        'the token counter is made by torch.zeros(..., device="cuda")',
    ),
)


@contextmanager
def shared_groups() -> Iterator[None]:
    """Within it megatron's groups of the same ranks are one.

    It makes twenty for a rank, most of them alike. With gloo each has a thread that wakes a hundred
    times a second.
    """
    from megatron.core import parallel_state

    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def create_group(
        ranks: Sequence[int], timeout: timedelta | None = None, **_: object
    ) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in made:
            made[key] = dist.new_group(list(ranks), timeout=timeout)
        return made[key]

    own = parallel_state.create_group
    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = own


def install() -> None:
    """Replace the names, once a process. Only for ranks without a GPU."""
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel.random  # noqa: F401

    for replacement in REPLACEMENTS:
        module = sys.modules[replacement.module]
        if not hasattr(module, replacement.name):
            raise RuntimeError(
                f"{replacement.module}.{replacement.name} is gone from this release of "
                "megatron-core; parallel/megatron_cpu.py must follow it"
            )
        setattr(module, replacement.name, replacement.substitute)
