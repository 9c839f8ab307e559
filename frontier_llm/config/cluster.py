"""The hardware: the speeds of devices, links and storage, each figure with its source."""

import re
from typing import Literal

from pydantic import Field, field_validator

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.config.section import Section


class DeviceConfig(Section):
    """One rank's device (on MI250X: one GCD, half a package)."""

    name: str
    """Its name."""
    kind: Literal["cpu", "cuda", "hip"]
    """Runtime: `cuda` for NVIDIA, `hip` for AMD, `cpu` without a GPU."""
    name_pattern: str
    """Regular expression for the driver's name of the device. If the name does not match, the peak
    is taken as unknown."""
    memory_gib: float = Field(gt=0)
    """Memory of the device, GiB."""
    memory_gb_per_second: float = Field(gt=0)
    """Memory bandwidth, GB/s."""
    peak_tflops: dict[Literal["fp32", "bf16", "fp16"], float]
    """Peak speed of dense matrix products by compute format, TFLOP/s. A format that is absent is
    unknown or unsupported, and no MFU is printed for it."""
    calibration: CalibrationConfig
    """Measured shares of these peaks, which the planner uses."""
    source: str
    """Source of these figures."""

    @field_validator("name_pattern")
    @classmethod
    def check_pattern(cls, pattern: str) -> str:
        """Refuse a pattern that `re.search` cannot use, before a run starts.

        Raises:
            ValueError: the pattern is not a regular expression.
        """
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern


class LinkConfig(Section):
    """One level of the network: the fastest path between two ranks that share it."""

    name: str
    """Its name."""
    ranks: int | None = Field(ge=2)
    """Number of neighbouring ranks that share this level; null = the whole machine."""
    latency_us: float = Field(gt=0)
    """Time of an empty message, microseconds."""
    gb_per_second: float = Field(gt=0)
    """Bandwidth per rank in one direction, GB/s."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the bandwidth that large collectives reach."""
    source: str
    """Source of these figures."""


class StorageConfig(Section):
    """A file system or disk for checkpoints."""

    name: str
    """Its name."""
    write_gb_per_second: float = Field(gt=0)
    """Write bandwidth per node, GB/s."""
    source: str
    """Source of these figures."""


class HostConfig(Section):
    """The host of a node's devices."""

    cores: int = Field(ge=1)
    """Cores that a job may use."""
    memory_gib: float = Field(gt=0)
    """Main memory, GiB."""
    source: str
    """Source of these figures."""


class ClusterConfig(Section):
    """A machine: nodes of equal devices, links from the nearest to the farthest."""

    name: str
    """Its name."""
    ranks_per_node: int = Field(ge=1)
    """Devices, and so ranks, per node."""
    device: DeviceConfig
    """The device of a rank."""
    host: HostConfig
    """The host of a node."""
    links: tuple[LinkConfig, ...] = Field(min_length=1, strict=False)
    """Links, nearest first; the last has `ranks: null`."""
    storage: tuple[StorageConfig, ...] = Field(strict=False)
    """Places for checkpoints, nearest first."""
    environment: dict[str, str]
    """Variables of NCCL, RCCL and libfabric that ranks should have on this cluster. A run prints
    which of them differ. scripts/*_env.sh sets them and gives the reasons."""

    @property
    def cores_per_rank(self) -> int:
        """Cores per rank."""
        return max(1, self.host.cores // self.ranks_per_node)
