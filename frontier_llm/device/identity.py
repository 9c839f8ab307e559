"""Description of a rank's device, cores, network and libraries, for checks and bug reports."""

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from frontier_llm.device.accelerator import Accelerator

PREFIXES = (
    "NCCL_", "RCCL_", "OFI_NCCL_", "FI_", "GLOO_", "MPICH_", "MASTER_", "TORCH_NCCL_", "HSA_",
    "ROCR_", "HIP_", "MIOPEN_", "GPU_MAX_HW_QUEUES", "OMP_NUM_THREADS", "TORCHINDUCTOR_", "TRITON_",
)  # fmt: skip
"""Prefixes of the environment variables that affect communication and computation. Those that the
files of sites set (scripts/*_env.sh) are among them."""
DEVICE_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
)  # fmt: skip
"""Environment variables of a GPU that launch/cores.py sets, unless they are set already."""
PACKAGES = ("torch", "megatron-core", "numpy", "triton", "apex", "transformer_engine")
_INTERFACES = Path("/sys/class/net")


def device_id(accelerator: Accelerator) -> str:
    """Return an identifier that is unique among the devices of a host; empty on a CPU.

    It has the UUID and the PCI address, because the two devices of an MI250X package may have the
    same UUID, and a partition of a GPU has the PCI address of the whole GPU.
    """
    if accelerator.is_cpu:
        return ""
    properties = torch.cuda.get_device_properties(accelerator.device)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    address = ":".join("?" if number is None else f"{number:02x}" for number in numbers)
    return f"{getattr(properties, 'uuid', 'no UUID')} at {address}"


def architecture(accelerator: Accelerator) -> str:
    """Return the architecture that kernels are compiled for: `gfx90a`, `sm_80`, `x86_64`."""
    if accelerator.is_cpu:
        return platform.machine()
    properties = torch.cuda.get_device_properties(accelerator.device)
    name = getattr(properties, "gcnArchName", "")
    return name.partition(":")[0] or f"sm_{properties.major}{properties.minor}"


def interfaces() -> tuple[str, ...]:
    """Return the network interfaces of this host that are up, without the loopback."""
    if not _INTERFACES.is_dir():
        return ()
    up = [path.name for path in sorted(_INTERFACES.iterdir()) if _is_up(path)]
    return tuple(name for name in up if name != "lo")


def cores() -> str:
    """Return the cores this process may run on, as ranges: `0-6,64-70`."""
    if not hasattr(os, "sched_getaffinity"):
        return f"0-{(os.cpu_count() or 1) - 1}"
    return as_ranges(os.sched_getaffinity(0))


def as_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: `{0, 1, 2, 7}` is `0-2,7`."""
    ranges: list[list[int]] = []  # first and last number of each
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def variables(environ: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return the variables that start with one of PREFIXES or are in `wanted`, if they are set."""
    names = {name for name in environ if name.startswith(PREFIXES)} | set(wanted)
    return {name: environ[name] for name in sorted(names) if name in environ}


def versions() -> dict[str, str]:
    """Return the versions of Python, PACKAGES, CUDA and ROCm; `absent` if not installed."""
    by_name = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_name[package] = version(package)
        except PackageNotFoundError:
            by_name[package] = "absent"
    by_name["cuda"] = torch.version.cuda or "absent"
    by_name["rocm"] = torch.version.hip or "absent"
    return by_name


def _is_up(interface: Path) -> bool:
    try:
        return (interface / "operstate").read_text().strip() != "down"
    except OSError:  # not an interface but a plain file (bonding_masters)
        return False
