"""The section `planner.engine`: properties of a training program that decide its speed.

A cluster file describes the hardware, and an engine file of conf/engine describes the program that
runs on it. The same layout on the same cluster takes different times with different programs.
"""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class HostTimes(Section):
    """Time that the CPU of a rank takes to start the work of its device, microseconds.

    The CPU runs ahead of the device. A pass takes at least as long as its work on the CPU, which
    decides the speed of small layers. On a cluster without devices (`kind: cpu`) the same core
    computes: only times that were measured there (`cluster.device.calibration.host`) are added.
    """

    layer_us: float = Field(1185.0, ge=0)
    """Forward pass of one layer."""
    backward_share: float = Field(1.6, gt=0)
    """Backward pass of one layer, relative to its forward pass."""
    tensor_us: float = Field(60.0, ge=0)
    """Added to `layer_us` with tensor parallelism."""
    tensor_rank_us: float = Field(30.0, ge=0)
    """Added for each tensor rank but the first."""
    tensor_wait_us: float = Field(0.0, ge=0)
    """Time in which the device waits for the slowest tensor rank in each of their collectives, for
    each tensor rank but the first. Computation does not hide it."""
    micro_batch_us: float = Field(1642.0, ge=0)
    """Work of a micro-batch outside its layers, during which the device waits."""
    step_us: float = Field(2000.0, ge=0)
    """Work of a step outside its micro-batches, during which the device waits."""


class EngineConfig(Section):
    """Properties of a training program. The default values describe this program."""

    name: str = "ours"
    """Name in the output."""
    fused_attention: bool = True
    """Whether one kernel computes attention without storing its scores (flash attention)."""
    product_ratio: float = Field(1.0, gt=0)
    """Speed of large matrix products, relative to the calibration of the device."""
    elementwise_factor: float = Field(1.415, ge=1)
    """Bytes that element-wise kernels move, relative to fully fused kernels. In an engine that
    follows `kernels`, this is the factor of `kernels=auto` and `fastest`."""
    follows_kernels: bool = True
    """Whether `kernels` decides the bytes of element-wise kernels. Then `torch`, `fused`,
    `elementwise` and `compiled` have the bytes that were counted in the code of a layer."""
    loss_bytes: float = Field(26.0, ge=0)
    """Bytes that the loss moves per logit, forward and backward pass together."""
    accumulation_bytes: float = Field(8.0, ge=0)
    """Bytes moved per parameter of a rank to add a micro-batch's gradient to the sums."""
    sums_bytes: int | None = Field(None, ge=1)
    """Bytes per element of the gradients that are summed over replicas; null = those of
    `collectives.sums_format`, or of `collectives.grads_format` in rings."""
    overlaps: bool = True
    """Whether gathers of parameters, reductions of gradients and the gather of updated parameters
    overlap with computation."""
    message_elements: int | None = Field(None, ge=1)
    """Elements per message of gathers and reductions; null = one message per sharding unit."""
    second_copy_ranks: int | None = Field(None, ge=1)
    """If set, backward passes gather parameters from a second copy that is sharded over this many
    neighbouring ranks (ZeRO++, arXiv:2306.10209)."""
    exchanges_gradients: bool = True
    """Whether gradients in bf16 are sent directly to the ranks that sum them, and not in rings.
    Integers are always sent directly."""
    split_exchange: bool = False
    """Whether each tensor rank sends only its part of a stage's output to the next stage, whose
    tensor ranks then gather the parts."""
    broadcasts_refresh: bool = False
    """Whether owners broadcast updated parameters, instead of an all-gather."""
    refresh_owner_us: float = Field(0.0, ge=0)
    """With `broadcasts_refresh`: time of the broadcasts of each owner in addition to their bytes,
    microseconds. The owners take turns."""
    reduces_once: bool = False
    """Whether sharded gradients are reduced once a step if there is a pipeline, and not once per
    micro-batch."""
    splits_backward: bool = True
    """Whether its pipelines may compute weight gradients later than input gradients."""
    shards: Literal["any", "none", "optimizer", "stages", "fsdp"] = "any"
    """States that the program can shard. `optimizer`: only those of the optimizer; `stages`: as the
    stages of ZeRO or as MiCS; `fsdp`: gradients and optimizer states together. A search is
    restricted to such factors."""
    recompute_stops_early: bool = False
    """Whether recomputation leaves out the last product of a layer, whose output is not needed."""
    host: HostTimes = HostTimes()
    """Time on the CPU."""
    source: str = ""
    """Source of these figures."""
