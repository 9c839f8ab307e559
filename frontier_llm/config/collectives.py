"""Number formats of the messages between data-parallel ranks."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

FormatName = Literal["fp32", "bf16", "int8", "int4"]
CommunicatorCount = Literal["many", "few", "one"]


class CollectivesConfig(Section):
    """The number format of each kind of collective.

    Integer formats send blocks of integers, each with a scale. Norms and biases are never sent as
    integers, but in 2 bytes per element. Values are never widened: with precision bf16, a
    `params_format` of fp32 sends bf16.

    Paper: ZeRO++ (arXiv:2306.10209).
    """

    name: str
    """Name of this choice in the output of a run."""
    params_format: FormatName
    """Format of parameters that are gathered before each forward pass."""
    params_backward_format: FormatName | None
    """Format of parameters that are gathered before each backward pass; null = `params_format`."""
    refresh_format: FormatName
    """Format of updated parameters, which are sent once per step from the ranks that updated them
    to the ranks that store them. If it has fewer bits than the compute format, the ranks that
    update keep fp32 master weights."""
    refresh_differences: bool = False
    """Whether the refresh sends the differences between the updated parameters and what was last
    sent, in the integer format `refresh_format`. All ranks add the same decoded difference, so
    their copies stay equal, and rounding errors do not add up (SDP4Bit, arXiv:2410.15526)."""
    refresh_full_every: int = Field(50, ge=1)
    """With `refresh_differences`: every so many steps, the parameters themselves are sent, in the
    compute format. They are also sent before every checkpoint and after every resume."""
    grads_format: FormatName
    """Format of gradients in a reduce-scatter. The rank that receives them always sums them in
    fp32."""
    grads_across_format: FormatName | None
    """Format of gradients in a reduce-scatter between several nodes; null = `grads_format`."""
    formats: dict[Literal["package", "node", "network"], FormatName] | None = None
    """Formats of gradients, and of their sums over replicas, by the farthest links that a message
    crosses. `package`: between devices of a package; `node`: between packages of a node; `network`:
    between nodes. A level that is not listed has the format of `grads_format`,
    `grads_across_format` or `sums_format`."""
    sums_format: FormatName
    """Format of gradients that are summed over the replicas of the optimizer states. In fp32 the
    sum is one all-reduce. In other formats it is a reduce-scatter and a gather, both in this
    format; the sums are computed in fp32."""
    rotation_elements: int = Field(0, ge=0, le=8192)
    """Number of consecutive elements of int4 gradients that are rotated together before they are
    rounded: a power of two from 16 up to `block_elements`; 0 = none. The rotation spreads large
    elements (SDP4Bit) and is undone after the messages are received."""
    block_elements: int = Field(ge=32, le=8192, multiple_of=32)
    """Elements per scale. Smaller blocks lose less precision and send more scales."""
    scales_format: Literal["fp32", "bf16"]
    """Format of the scales."""
    rounding: Literal["nearest", "stochastic"]
    """`nearest`: to the nearest integer; `stochastic`: up or down at random, exact on average and
    reproducible from trainer.seed."""
    error_feedback: bool
    """Whether the rounding error of a gradient between nodes is kept on the sending rank and added
    to the next gradient."""
    feedback_format: Literal["bf16", "int8"] = "bf16"
    """Format of the rounding errors that are kept."""
    feedback_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the old errors in a moving average (LoCo, arXiv:2407.04480); 0 = only the last
    error is kept."""
    feedback_reset_every: int | None = Field(None, ge=1)
    """Discard the errors every so many steps; null = never."""
    pairwise: bool = True
    """Whether gathers and scatters on a CPU are point-to-point messages between all pairs of ranks,
    and pipeline stages receive early. That is several times as fast as gloo's collectives. false
    runs the code of a GPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Library that sends messages. `auto`: nccl between GPUs (RCCL on AMD GPUs), gloo between CPUs.
    `gloo` also sends tensors of GPUs, through the memory of the host, which is slow. It allows
    several ranks to share one GPU, but no pipeline."""
    communicators: CommunicatorCount | None = None
    """How many NCCL or RCCL communicators of a rank may work at the same time. `many`: each kind of
    message has one of its own, so that messages wait only for what they need. `few`: at most two,
    of which one is for tensor parallelism. `one`: messages are sent strictly one after another.
    With `few` and `one`, groups of the same ranks share a communicator, and so do all messages
    between pipeline stages, which takes less memory. RCCL on MI250X is reported to hang while
    several communicators work (ROCm/rccl#2191). null = as the cluster's file says
    (cluster.device.communicators)."""
    until_step: int | None = Field(ge=1)
    """Last step with integer formats. Later steps use fp32. null = all steps use integer
    formats."""

    @property
    def grads_formats(self) -> tuple[FormatName, ...]:
        """The formats of gradients in reduce-scatters: in a package, in a node, between nodes."""
        across = self.grads_across_format or self.grads_format
        return self._by_level(self.grads_format, self.grads_format, across)

    @property
    def sums_formats(self) -> tuple[FormatName, ...]:
        """The formats of sums over replicas: in a package, in a node, between nodes."""
        return self._by_level(*[self.sums_format] * 3)

    @property
    def names(self) -> tuple[FormatName, ...]:
        """The formats of all collectives."""
        parameters = (
            self.params_format,
            self.params_backward_format or self.params_format,
            self.refresh_format,
        )
        return (*parameters, *self.grads_formats, *self.sums_formats)

    @property
    def is_quantised(self) -> bool:
        """Whether any collective sends integers."""
        return any(name.startswith("int") for name in self.names)

    def _by_level(
        self, package: FormatName, node: FormatName, network: FormatName
    ) -> tuple[FormatName, ...]:
        formats = self.formats or {}
        return (
            formats.get("package", package),
            formats.get("node", node),
            formats.get("network", network),
        )
