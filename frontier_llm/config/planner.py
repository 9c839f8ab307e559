"""What the planner searches, and what it calls best."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from frontier_llm.config.section import Section

Recompute = Literal["none", "selective", "full"]
Size = Annotated[int, Field(ge=1)]
Sizes = tuple[Size, ...]


class PlannerConfig(Section):
    """The space of layouts: null = everything that is legal."""

    nodes: Sizes | None = Field(strict=False)
    """Nodes of `cluster` to plan for: a number, or a list for a scaling study; null = as many as
    launch.ranks fill."""
    tensor: Sizes | None = Field(strict=False)
    """Values of parallel.tensor to try; null = all that fit into a node."""
    pipeline: Sizes | None = Field(strict=False)
    """Values of parallel.pipeline to try."""
    chunks: Sizes | None = Field(strict=False)
    """Values of parallel.chunks to try; null = 1, 2, 4 and 8."""
    micro_batch: Sizes | None = Field(strict=False)
    """Values of data.micro_batch to try; null = powers of two."""
    recompute: tuple[Recompute, ...] | None = Field(strict=False)
    """Values of recompute to try."""
    params: Sizes | None = Field(strict=False)
    """Values of sharding.params to try; null = divisors of the data ranks."""
    grads: Sizes | None = Field(strict=False)
    """Values of sharding.grads to try."""
    optimizer: Sizes | None = Field(strict=False)
    """Values of sharding.optimizer to try."""
    collectives: tuple[str, ...] | None = Field(strict=False)
    """Presets of collectives to try; null = the one that is chosen: others round what is sent."""
    objective: Literal["throughput", "memory", "nodes"]
    """What is best: most tokens a second, least peak memory, or the fewest of `planner.nodes` that
    reach `planner.goal_tokens_per_second`."""
    goal_tokens_per_second: float | None = Field(gt=0)
    """For the objective `nodes`: tokens a second of the whole job."""
    rows: int = Field(ge=1)
    """Layouts to print, the best first."""
    memory_share: float = Field(gt=0, le=1)
    """Share of a device's memory that a layout may fill."""

    @field_validator("nodes", mode="before")
    @classmethod
    def make_list(cls, value: Any) -> Any:
        """Take `planner.nodes=128` for a list of one."""
        return (value,) if type(value) is int else value
