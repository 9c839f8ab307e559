"""Over how many data-parallel ranks one copy of each model state is cut (AMSP's factors)."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

Factor = int | Literal["node", "all"]


class ShardingConfig(Section):
    """Three independent factors; each divides the next: params, grads, optimizer, DP.

    Paper: AMSP (arXiv:2311.00257).
    """

    name: str
    """What the run calls this choice."""
    params: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the parameters is cut: an integer, `node` or `all`."""
    grads: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the gradients is cut."""
    optimizer: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the master weights and moments is cut."""
