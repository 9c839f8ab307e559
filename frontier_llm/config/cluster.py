"""The hardware: what a device and a link can do, each figure with its source."""

import re
from typing import Literal

from pydantic import Field, field_validator

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.config.section import Section


class DeviceConfig(Section):
    """One rank's device (on MI250X: one GCD, half a package)."""

    name: str
    """As people call it."""
    kind: Literal["cpu", "cuda", "hip"]
    """Which runtime drives it."""
    name_pattern: str
    """Regular expression that the driver's device name must match; else the peak is unknown."""
    memory_gib: float = Field(gt=0)
    """Memory of the device."""
    memory_gb_per_second: float = Field(gt=0)
    """Memory bandwidth."""
    peak_tflops: dict[Literal["fp32", "bf16", "fp16"], float]
    """Dense matrix peak by compute format; absent = unknown, and then no MFU is printed."""
    calibration: CalibrationConfig
    """How much of this the planner may count on."""
    source: str
    """Where these figures come from."""

    @field_validator("name_pattern")
    @classmethod
    def check_pattern(cls, pattern: str) -> str:
        """Refuse here what `re.search` would refuse in the middle of a run."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern


class LinkConfig(Section):
    """One level of the network: the fastest path between two ranks that share it."""

    name: str
    """As people call it."""
    ranks: int | None = Field(ge=2)
    """Neighbouring ranks that share this level; null = the whole machine."""
    latency_us: float = Field(gt=0)
    """Time of an empty message."""
    gb_per_second: float = Field(gt=0)
    """Bandwidth a rank, one direction."""
    efficiency: float = Field(gt=0, le=1)
    """Share of it that large collectives reach."""
    source: str
    """Where these figures come from."""


class StorageConfig(Section):
    """A place where checkpoints may lie."""

    name: str
    """As people call it."""
    write_gb_per_second: float = Field(gt=0)
    """Bandwidth a node, writing."""
    source: str
    """Where these figures come from."""


class HostConfig(Section):
    """The node around the devices."""

    cores: int = Field(ge=1)
    """Cores that a job may use."""
    memory_gib: float = Field(gt=0)
    """Main memory."""
    source: str
    """Where these figures come from."""


class ClusterConfig(Section):
    """A machine: nodes of equal devices, links from the nearest to the farthest."""

    name: str
    """As people call it."""
    ranks_per_node: int = Field(ge=1)
    """Devices (ranks) in a node."""
    device: DeviceConfig
    """The device of a rank."""
    host: HostConfig
    """The node."""
    links: tuple[LinkConfig, ...] = Field(min_length=1, strict=False)
    """Nearest first; the last has `ranks: null`."""
    storage: tuple[StorageConfig, ...] = Field(strict=False)
    """Nearest first."""
    environment: dict[str, str]
    """Variables of NCCL, RCCL and libfabric that a rank should have here; at start-up it is said
    where they differ. scripts/*_env.sh sets them, with reasons."""

    @property
    def cores_per_rank(self) -> int:
        """Cores that a rank may use."""
        return max(1, self.host.cores // self.ranks_per_node)
