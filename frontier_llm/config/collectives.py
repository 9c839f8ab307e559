"""What travels between data-parallel ranks."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

FormatName = Literal["fp32", "bf16", "int8", "int4"]


class CollectivesConfig(Section):
    """Number formats on the wire, a collective each.

    Integers travel in blocks that share a scale; norms and biases in two bytes beside them.
    Nothing is sent wider than it is: in bf16 a `params_format` of fp32 sends bf16.

    Paper: ZeRO++ (arXiv:2306.10209).
    """

    name: str
    """What the run calls this choice."""
    params_format: FormatName
    """Parameters, gathered before each forward pass."""
    params_backward_format: FormatName | None
    """Parameters, gathered before each backward pass; null = as before the forward pass."""
    refresh_format: FormatName
    """Parameters, once a step, from the ranks that updated them to those that hold them. With
    fewer bits than the model computes with, fp32 masters are kept beside the parameters."""
    grads_format: FormatName
    """In which gradients travel when they are scattered. They always add up in fp32, once, on the
    rank that receives them."""
    grads_across_format: FormatName | None
    """The same where the ranks are not all on one node; null = as inside a node."""
    block_elements: int = Field(ge=32, le=8192, multiple_of=32)
    """Elements that share a scale: fewer are more exact, and send more scales."""
    scales_format: Literal["fp32", "bf16"]
    """Of the scales."""
    rounding: Literal["nearest", "stochastic"]
    """To the nearest integer; or up or down at random, right on average, the same for a seed."""
    error_feedback: bool
    """Whether what rounding loses of a gradient between nodes is kept (bf16, on the rank that
    sends) and added to the next one."""
    until_step: int | None = Field(ge=1)
    """The last step with integers; after it they are replaced by fp32. null = all steps."""

    @property
    def formats(self) -> tuple[FormatName, ...]:
        """All formats that are used."""
        return (
            self.params_format,
            self.params_backward_format or self.params_format,
            self.refresh_format,
            self.grads_format,
            self.grads_across_format or self.grads_format,
        )

    @property
    def is_quantised(self) -> bool:
        """Whether anything travels as integers."""
        return any(name.startswith("int") for name in self.formats)
