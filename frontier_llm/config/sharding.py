"""The section `sharding`: over how many data-parallel ranks each model state is sharded."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section

Factor = int | Literal["package", "node", "all", "auto"]


class ShardingConfig(Section):
    """The three sharding factors of AMSP (arXiv:2311.00257), and the prefetching of parameters.

    A factor is the number of data-parallel ranks over which one copy of a model state is sharded.
    `params` divides `grads`, `grads` divides `optimizer`, and `optimizer` divides the number of
    data-parallel ranks.

    A factor is an integer or a word. `node` is the number of data-parallel ranks of a stage in one
    node, `package` the number in one package of devices (cluster.links), and `all` is the number of
    all of them. `auto` chooses the factors with which the planner predicts the fastest step that
    fits in memory; either all three factors are `auto`, or none.
    """

    name: str
    """Name of this choice in the output of a run."""
    params: Factor = Field(union_mode="left_to_right")
    """Number of ranks over which one copy of the parameters is sharded: an integer, `package`,
    `node`, `all` or `auto`."""
    grads: Factor = Field(union_mode="left_to_right")
    """Number of ranks over which one copy of the gradients is sharded."""
    optimizer: Factor = Field(union_mode="left_to_right")
    """Number of ranks over which one copy of the master weights and of the moments is sharded."""
    units_in_flight: int = Field(ge=1)
    """Number of units (usually layers) that are gathered ahead, the unit that is read included, and
    number of reductions that may run while the next unit computes. 1 = no prefetching. Larger
    numbers overlap more communication with computation and need more memory."""
    fused_gradients: bool = True
    """Whether linear layers compute the gradients of their weights directly in the buffer that sums
    or sends them. If not, autograd makes a tensor of each gradient, which is then added. In
    compiled layers it always does."""
