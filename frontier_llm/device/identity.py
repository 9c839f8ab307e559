"""Which device, cores, network interfaces and libraries a rank has: for checks and bug reports."""

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from frontier_llm.device.accelerator import Accelerator

PREFIXES = ("NCCL_", "RCCL_", "FI_", "GLOO_", "HSA_", "MIOPEN_", "TORCH_NCCL_", "ROCR_", "HIP_")
"""Of the environment variables that decide how ranks talk and compute."""
PACKAGES = ("torch", "megatron-core", "numpy", "triton", "apex", "transformer_engine")
_INTERFACES = Path("/sys/class/net")


def device_id(accelerator: Accelerator) -> str:
    """Return what tells a device from all others of its host; empty on a CPU."""
    if accelerator.is_cpu:
        return ""
    properties = torch.cuda.get_device_properties(accelerator.device)
    # A UUID where the driver gives one; else its place on the PCI bus.
    unique = getattr(properties, "uuid", None)
    return str(unique or f"pci bus {getattr(properties, 'pci_bus_id', 'unknown')}")


def architecture(accelerator: Accelerator) -> str:
    """Return what kernels must be compiled for: `gfx90a`, `sm_80`, `x86_64`."""
    if accelerator.is_cpu:
        return platform.machine()
    properties = torch.cuda.get_device_properties(accelerator.device)
    name = getattr(properties, "gcnArchName", "")
    return name.partition(":")[0] or f"sm_{properties.major}{properties.minor}"


def interfaces() -> tuple[str, ...]:
    """Return the network interfaces of this host that are up, the loopback left out."""
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
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def variables(environ: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return the variables that decide how ranks talk, and the wanted ones, where they are set."""
    names = {name for name in environ if name.startswith(PREFIXES)} | set(wanted)
    return {name: environ[name] for name in sorted(names) if name in environ}


def versions() -> dict[str, str]:
    """Return the versions of what a bug report needs; `absent` where there is none."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    found["cuda"] = torch.version.cuda or "absent"
    found["rocm"] = torch.version.hip or "absent"
    return found


def _is_up(interface: Path) -> bool:
    try:
        return (interface / "operstate").read_text().strip() != "down"
    except OSError:  # a file of another kind lies there (bonding_masters)
        return False
