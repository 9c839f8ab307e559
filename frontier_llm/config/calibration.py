"""The section `cluster.device.calibration`: constants from which the planner predicts speeds."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.engine import HostTimes
from frontier_llm.config.section import Section


class MatrixCurve(Section):
    """The speed of matrix products.

    Very large products run at `tflops`. On a device with `processors`, smaller products are slower
    because of tiles and waves (planner/compute.py). On other devices, a product of an [m, k] and a
    [k, n] matrix takes 2 (mnk + half_size (mn + nk + km)) / v seconds, where v is `tflops` in
    operations per second: with m = n = k = 3 half_size it runs at half of this speed.
    """

    tflops: float = Field(gt=0)
    """Speed of very large products, TFLOP/s."""
    half_size: float = Field(0.0, ge=0)
    """Matrix size, in rows, below which products are slow on a device without `processors`."""


class KernelSpeeds(Section):
    """Speeds of kernels in one compute format that `frontier-llm calibrate` measured."""

    attention_tflops: float = Field(gt=0)
    """Speed of the forward pass of fused causal attention, TFLOP/s without the masked half."""
    attention_backward_tflops: float = Field(gt=0)
    """The same for its backward pass, which computes 2.5 times the operations."""
    weight_gradient_ratio: float = Field(gt=0)
    """Seconds of a weight gradient, with its addition to the fp32 sums, relative to the seconds of
    the forward product."""
    elementwise_gb_per_second: float = Field(gt=0)
    """Bytes per second, in GB/s, of the norms, the activation function and the residual additions
    of a layer, forward and backward pass together. The bytes are those of fully fused kernels."""
    quantise_gb_per_second: float | None = Field(None, gt=0)
    """Bytes per second, in GB/s, that kernels read and write to quantise and dequantise messages;
    null = those of `memory_share`."""


class CalibrationConfig(Section):
    """Constants that `frontier-llm calibrate` measures or benchmarks/planner_accuracy.py fits."""

    products: dict[Literal["fp32", "bf16", "fp16"], MatrixCurve]
    """Speed of matrix products by compute format. The planner predicts times only for the formats
    that are listed."""
    kernels: dict[Literal["fp32", "bf16", "fp16"], KernelSpeeds] = Field({})
    """Measured speeds of other kernels by compute format. A format that is not listed has the
    speeds of `attention_share`, of `memory_share` and of the engine's `elementwise_factor`."""
    host: dict[Literal["fp32", "bf16", "fp16"], HostTimes] = Field({})
    """Measured times of this program on the CPU of a rank, by compute format. A format that is not
    listed has the times of `planner.engine`. On a cluster without devices, they are added to the
    times of the kernels."""
    attention_share: float = Field(gt=0)
    """Speed of a fused attention kernel as a share of `tflops`. The masked half of causal attention
    is not counted as work."""
    memory_share: float = Field(gt=0, le=1)
    """Share of the memory bandwidth that element-wise kernels reach."""
    kernel_us: float = Field(ge=0)
    """Time between the starts of two empty kernels, microseconds. Each kernel takes this time in
    addition to its work."""
    collective_us: float = Field(ge=0, default=0)
    """Time of a collective in addition to the latency of its steps, microseconds."""
    hidden_share: float = Field(ge=0, le=1)
    """Share of the communication time that is hidden when it overlaps with computation."""
    reserved_gib: float = Field(ge=0)
    """Memory of the driver's context and of the loaded kernels, GiB. On a CPU this is the memory of
    the interpreter and its libraries."""
    workspace_mib: float = Field(ge=0, default=0)
    """Memory that the library of matrix products takes as its workspace, MiB."""
    channels: int = Field(ge=0, default=0)
    """Channels of an NCCL or RCCL communicator, each of which has buffers; NCCL prints their number
    with NCCL_DEBUG=INFO. 0 = communicators take no device memory, as on a CPU."""
    slack_share: float = Field(ge=0)
    """Memory that the allocator holds unused, as a share of the memory of temporary tensors."""
    source: str
    """Source of these figures; it says `not measured` if nothing of this device was measured."""

    @property
    def is_measured(self) -> bool:
        """Whether times that are predicted from these figures can be compared with measurements."""
        return "not measured" not in self.source
