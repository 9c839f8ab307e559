"""What travels between data-parallel ranks."""

from typing import Literal

from frontier_llm.config.section import Section


class CollectivesConfig(Section):
    """Number formats on the wire."""

    grads_format: Literal["fp32", "bf16"]
    """In which gradients travel when they are scattered. They always add up in fp32, once, on the
    rank that receives them."""
