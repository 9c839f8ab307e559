"""Over how many data-parallel ranks one copy of each model state is cut (AMSP's factors)."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

Factor = int | Literal["node", "all", "auto"]


class ShardingConfig(Section):
    """Three independent factors; each divides the next: params, grads, optimizer, DP.

    `node` is the replicas of a node, `all` all replicas; `auto`, for all three or none, the
    smallest factors whose states fit the device's memory.

    Paper: AMSP (arXiv:2311.00257).
    """

    name: str
    """What the run calls this choice."""
    params: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the parameters is cut: an integer, `node`, `all` or `auto`."""
    grads: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the gradients is cut."""
    optimizer: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the master weights and moments is cut."""
    units_in_flight: int = Field(ge=1)
    """Units (layers) whose gathered parameters are in memory at once, and reductions under way, at
    most. 1 = nothing is prefetched; more hide more communication and hold more memory."""
