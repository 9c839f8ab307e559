"""AMSP's factors: over how many data-parallel ranks one copy of each model state is sharded."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

Factor = int | Literal["node", "all", "auto"]


class ShardingConfig(Section):
    """Three factors. Each divides the next: params, grads, optimizer, number of replicas.

    A factor is an integer or a word. `node`: the number of replicas in a node; `all`: the number of
    all replicas; `auto`, for all three or none: the smallest factors with which the model states
    fit the device's memory.

    Paper: AMSP (arXiv:2311.00257).
    """

    name: str
    """Name of this choice in the output of a run."""
    params: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the parameters is sharded: an integer, `node`, `all` or
    `auto`."""
    grads: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the gradients is sharded."""
    optimizer: Factor = Field(union_mode="left_to_right")
    """Ranks over which one copy of the master weights and of the moments is sharded."""
    units_in_flight: int = Field(ge=1)
    """Most units (layers) whose gathered parameters are in memory at once, and most reductions in
    progress at once. 1 = no prefetching; more overlap more communication and need more memory."""
