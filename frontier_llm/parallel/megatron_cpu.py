"""megatron-core on a CPU: replaces names in torch and megatron.

megatron-core 0.16.1 assumes that the device of a rank is a CUDA device. On a machine without a GPU,
`install` replaces the functions of torch and megatron that need one. On a GPU nothing is replaced.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class _CpuStream:
    """Replaces a CUDA stream; a CPU runs everything in order."""

    def wait_stream(self, other: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: object, **__: object) -> None:
    return None


def _seed(seed: int) -> None:
    # torch.manual_seed would also keep a call, with its traceback, for GPUs that are never used
    torch.default_generator.manual_seed(seed)


def _get_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


@dataclass(frozen=True)
class Replacement:
    """A name that is replaced on a CPU."""

    module: str
    name: str
    substitute: Callable[..., Any] | object
    reason: str
    """What megatron uses the name for."""


_RANDOM = "megatron.core.tensor_parallel.random"

REPLACEMENTS = (
    Replacement("torch.cuda", "current_device", _cpu_device, "buffers are allocated on it"),
    Replacement("torch.cuda", "empty_cache", _nothing, "called between phases"),
    Replacement("torch.cuda", "current_stream", _CpuStream, "side streams join it"),
    Replacement("torch.cuda", "manual_seed", _seed, "the dropout tracker seeds with it"),
    Replacement("torch.cuda", "get_rng_state", _get_state, "the dropout tracker keeps states"),
    Replacement("torch.cuda", "set_rng_state", _set_state, "the dropout tracker sets states"),
    Replacement(_RANDOM, "_get_cuda_rng_state", _get_state, "recomputation replays dropout"),
    Replacement(_RANDOM, "_set_cuda_rng_state", _set_state, "recomputation replays dropout"),
)


def install() -> None:
    """Replace the names, once per process. Only for ranks without a GPU.

    Raises a RuntimeError if this release of megatron-core does not have one of the names.
    """
    import megatron.core.tensor_parallel.random  # noqa: F401

    for replacement in REPLACEMENTS:
        module = sys.modules[replacement.module]
        if not hasattr(module, replacement.name):
            raise RuntimeError(
                f"{replacement.module}.{replacement.name} is gone from this release of "
                "megatron-core; parallel/megatron_cpu.py must follow it"
            )
        setattr(module, replacement.name, replacement.substitute)
