"""The device that a rank computes on: an NVIDIA or AMD GPU, or the CPU."""

import ctypes
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from frontier_llm.errors import LaunchError

BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "svebf16", "bf16")
"""Flags in /proc/cpuinfo of processors that multiply matrices in bf16. Others emulate it slowly."""
CPUINFO = Path("/proc/cpuinfo")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
_TRIM_BYTES = 2**31 - 1
"""Free memory at the top of the heap above which malloc returns it: the largest allowed value."""
_MMAP_BYTES = 32 * 2**20
"""Size above which an allocation bypasses the heap: the largest allowed value."""


@dataclass(frozen=True)
class Accelerator:
    """The device of a rank: `cpu`, `cuda` or `hip`, with the name that its driver gives."""

    device: torch.device
    kind: str
    name: str

    @classmethod
    def of_rank(cls, local_rank: int, *, may_share: bool = False) -> "Accelerator":
        """Return the GPU of this rank, or the CPU if there is no GPU.

        Under `--gpus-per-task=1` a rank sees one device, whatever its local rank.
        """
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not visible:
            return cls(torch.device("cpu"), "cpu", "cpu")
        if 1 < visible <= local_rank and not may_share:
            raise LaunchError(
                f"there is no device for local rank {local_rank}: {visible} are visible on this "
                f"node. Start at most {visible} ranks per node (launch.ranks, --ntasks-per-node)."
            )
        index = local_rank % visible
        torch.cuda.set_device(index)
        kind = "hip" if torch.version.hip else "cuda"
        return cls(torch.device("cuda", index), kind, torch.cuda.get_device_name(index))

    @property
    def is_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.kind == "cpu"

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.device)

    def peak_bytes(self) -> int:
        """Return the peak memory so far: device allocations, or the resident set on a CPU."""
        if self.is_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return torch.cuda.max_memory_allocated(self.device)

    def allocator_bytes(self) -> dict[str, int]:
        """Return the peaks so far of torch's allocator on a GPU; empty on a CPU.

        `allocated` is the memory of tensors. `reserved` is the memory that the allocator has taken
        from the device; the difference is lost to fragmentation and to freed tensors.
        """
        if self.is_cpu:
            return {}
        # max_memory_allocated and max_memory_reserved would each collect and sort all statistics
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return {name: stats[f"{name}_bytes"]["all"]["peak"] for name in ("allocated", "reserved")}


def choose_precision(accelerator: Accelerator, cpuinfo: Path = CPUINFO) -> tuple[str, str]:
    """Choose bf16 if the device has instructions for it, and fp32 otherwise; return why, too.

    Nothing is measured, so every start on a machine chooses the same.
    """
    if accelerator.is_cpu:
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
        found = next((flag for flag in BF16_INSTRUCTIONS if flag in flags), None)
        if found:
            return "bf16", f"this processor has instructions for it: {found}"
        return "fp32", "this processor has no instructions for bf16"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", f"{accelerator.name} computes in bf16"
    return "fp32", f"{accelerator.name} has no bf16; precision=fp16 is faster"


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for later requests; return whether this system's malloc can.

    On a CPU, activations and gathered parameters of the same sizes are allocated and freed in every
    step. If freed memory went back to the kernel, the kernel would clear and map it again, page by
    page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
