"""The section `cluster`: sizes and speeds of devices, links and storage, with their sources."""

import re
from typing import Literal

from pydantic import Field, field_validator

from frontier_llm.config.calibration import CalibrationConfig
from frontier_llm.config.collectives import CommunicatorCount
from frontier_llm.config.section import Section

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "gradient_scatter"]
"""Collectives whose speed can be measured: three of the communication library, and the
reduce-scatter of gradients (collectives/primitives.py), which on a CPU is not the library's."""


class DeviceConfig(Section):
    """The device of a rank (on MI250X one GCD, which is half of a package)."""

    name: str
    """Name in the output of a run."""
    kind: Literal["cpu", "cuda", "hip"]
    """Runtime: `cuda` for NVIDIA, `hip` for AMD, `cpu` without a GPU."""
    name_pattern: str
    """Regular expression that the device name of the driver must match, for `cluster=auto` and for
    the peak speed, which otherwise counts as unknown."""
    memory_gib: float = Field(gt=0)
    """Memory that the driver gives to programs, GiB: a little less than on the data sheet."""
    memory_gb_per_second: float = Field(gt=0)
    """Memory bandwidth, GB/s."""
    processors: int | None = Field(ge=1, default=None)
    """Streaming multiprocessors (NVIDIA) or compute units (AMD), each of which computes a tile of a
    matrix product at a time; null = products are not computed in tiles, as on a CPU."""
    communicators: CommunicatorCount = "many"
    """How many communicators may work at the same time, unless collectives.communicators says
    otherwise."""
    peak_tflops: dict[Literal["fp32", "bf16", "fp16"], float]
    """Peak speed of dense matrix products by compute format, TFLOP/s. If the peak of a format is
    unknown or the device does not support it, the format is left out, and no MFU is printed."""
    calibration: CalibrationConfig
    """Constants from which the planner predicts the speed that is reached."""
    source: str
    """Source of these figures."""

    @field_validator("name_pattern")
    @classmethod
    def check_pattern(cls, pattern: str) -> str:
        """Refuse a pattern that `re.search` cannot use, before a run starts."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern


class CollectiveSpeed(Section):
    """Measured speed of one kind of collective, as that of a ring."""

    latency_us: float = Field(ge=0)
    """Time of one step around the ring, microseconds. An all-gather or a reduce-scatter of w ranks
    has w - 1 steps, an all-reduce 2 (w - 1)."""
    gb_per_second: float = Field(gt=0)
    """Bytes that each rank sends per second, GB/s."""


class LinkConfig(Section):
    """One level of links, such as the links inside a node."""

    name: str
    """Name in the output of a run."""
    ranks: int | None = Field(ge=2)
    """Number of neighbouring ranks that this level connects; null = all ranks of the machine."""
    latency_us: float = Field(gt=0)
    """Time of an empty message, microseconds."""
    gb_per_second: float = Field(gt=0)
    """Bandwidth per rank in one direction, GB/s."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the bandwidth that large collectives reach."""
    contention: float = Field(ge=0, default=0)
    """Loss of bandwidth by doubling the domains that a collective connects: over n nodes, the
    bandwidth is divided by 1 + contention x log2(n)."""
    collectives: dict[Collective, CollectiveSpeed] = Field({})
    """Measured speeds of collectives between ranks of this level. A
    collective that is not listed has the latency and the bandwidth of the link."""
    source: str
    """Source of these figures."""


class StorageConfig(Section):
    """A file system or disk for checkpoints."""

    name: str
    """Name in the output of a run."""
    write_gb_per_second: float = Field(gt=0)
    """Write bandwidth per node, GB/s."""
    source: str
    """Source of these figures."""


class HostConfig(Section):
    """The CPU and main memory of a node."""

    cores: int = Field(ge=1)
    """CPU cores that a job may use."""
    memory_gib: float = Field(gt=0)
    """Main memory, GiB."""
    source: str
    """Source of these figures."""


class OperationConfig(Section):
    """Power and reliability of the machine, for the cost of a run."""

    node_watts: float | None = Field(gt=0)
    """Power of a node in training, with its share of the network, watts; null = unknown."""
    node_hours_per_failure: float | None = Field(gt=0)
    """Node-hours until a failure interrupts a run, on average; null = unknown."""
    source: str
    """Source of these figures."""


class EnvironmentAlternative(Section):
    """Other values of some environment variables, for which there is a reason to measure them."""

    variables: dict[str, str | None] = Field(min_length=1)
    """Environment variables and their values; null = not set."""
    reason: str
    """Why these values may be better or worse."""
    source: str
    """Source of the reason."""


class ClusterConfig(Section):
    """A machine with equal nodes."""

    name: str
    """Name in the output of a run."""
    ranks_per_node: int = Field(ge=1)
    """Devices, and so ranks, per node."""
    device: DeviceConfig
    """The device of a rank."""
    host: HostConfig
    """The host of a node."""
    links: tuple[LinkConfig, ...] = Field(min_length=1, strict=False)
    """Links, from the nearest to the farthest. The last link has `ranks: null`."""
    storage: tuple[StorageConfig, ...] = Field(strict=False)
    """Places for checkpoints, from the nearest to the farthest."""
    operation: OperationConfig | None = None
    """Power and reliability. Cluster files of users may leave it out."""
    environment: dict[str, str]
    """Environment variables of NCCL, RCCL and libfabric that ranks should have on this cluster. A
    run prints the variables whose values differ. scripts/*_env.sh sets them and gives the
    reasons."""
    environment_alternatives: tuple[EnvironmentAlternative, ...] = Field((), strict=False)
    """Values about which sources disagree. `frontier-llm doctor --network` measures each set."""

    def ranks_per_package(self, ranks_per_node: int) -> int:
        """Return the ranks that the nearest links connect inside a node; 1 = there are none."""
        nearest = self.links[0].ranks or ranks_per_node
        return nearest if nearest < ranks_per_node and ranks_per_node % nearest == 0 else 1

    @property
    def estimate_note(self) -> str:
        """What to write beside predictions for a device of which no speed was measured; or ""."""
        if self.device.calibration.is_measured:
            return ""
        return f"estimates: no speed of {self.name} was measured (by frontier-llm calibrate)"

    @property
    def cores_per_rank(self) -> int:
        """CPU cores per rank."""
        return max(1, self.host.cores // self.ranks_per_node)
