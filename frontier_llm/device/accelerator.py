"""The device of a rank: a GPU of NVIDIA or AMD, or the CPU."""

import resource
import time
from dataclasses import dataclass

import torch

from frontier_llm.errors import LaunchError

MEASURED_SECONDS = 0.05


@dataclass(frozen=True)
class Accelerator:
    """What a rank computes on.

    Attributes:
        device: for torch.
        kind: `cpu`, `cuda` or `hip`.
        name: as the driver says it.
    """

    device: torch.device
    kind: str
    name: str

    @classmethod
    def of_rank(cls, local_rank: int) -> "Accelerator":
        """Take the GPU of this rank, or the CPU where there is none.

        Under `--gpus-per-task=1` a rank sees one device, whatever its local rank.

        Raises:
            LaunchError: more ranks on the node than devices.
        """
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not visible:
            return cls(torch.device("cpu"), "cpu", "cpu")
        if visible > 1 and local_rank >= visible:
            raise LaunchError(
                f"local rank {local_rank} has no device of its own: {visible} are visible on this "
                f"node. Start at most {visible} ranks a node (launch.ranks, --ntasks-per-node)."
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
        """Wait until the device has done all that it was given."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.device)

    def peak_bytes(self) -> int:
        """Return the most memory held so far: device allocations, or the resident set on CPU."""
        if self.is_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return torch.cuda.max_memory_allocated(self.device)

    def matmul_flops_per_second(self, dtype: torch.dtype, size: int = 384) -> float:
        """Measure the speed of a square matrix product, in about 0.1 s."""
        a = torch.ones(size, size, dtype=dtype, device=self.device)
        torch.matmul(a, a)  # the first call chooses a kernel
        self.synchronize()
        repetitions, start = 0, time.perf_counter()
        while time.perf_counter() - start < MEASURED_SECONDS:
            torch.matmul(a, a)
            self.synchronize()
            repetitions += 1
        return 2 * size**3 * repetitions / (time.perf_counter() - start)


def faster_precision(accelerator: Accelerator) -> tuple[str, str]:
    """Choose between bf16 and fp32 by measuring both.

    Returns:
        The name of the faster one, and the measurement in words.
    """
    speeds = {
        name: accelerator.matmul_flops_per_second(dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    words = ", ".join(f"{name} {speed / 1e9:.0f} GFLOP/s" for name, speed in speeds.items())
    return max(speeds, key=lambda name: speeds[name]), words
