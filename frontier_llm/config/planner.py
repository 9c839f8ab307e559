"""The section `planner`: the layouts that the planner searches, and its objective."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from frontier_llm.config.engine import EngineConfig
from frontier_llm.config.parallel import ScheduleName
from frontier_llm.config.section import Section

Recompute = Literal["none", "selective", "full"]
Size = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1)]


class PlannerConfig(Section):
    """The search of frontier-llm plan. If a list is null, every valid value is tried."""

    nodes: Sizes | None = Field(strict=False)
    """Number of nodes of the cluster to plan for, or a list of numbers for a scaling study; null =
    as many nodes as launch.ranks need."""
    tensor: Sizes | None = Field(strict=False)
    """Values of parallel.tensor to try; null = all sizes that fit into one node."""
    pipeline: Sizes | None = Field(strict=False)
    """Values of parallel.pipeline to try."""
    context: Sizes | None = Field(strict=False, default=None)
    """Values of parallel.context to try, such as [1,2,4]; null = only the configured one, for which
    `auto` stands for the divisors of the data ranks."""
    chunks: Sizes | None = Field(strict=False)
    """Values of parallel.chunks to try; null = 1, 2, 4 and 8."""
    schedule: tuple[ScheduleName, ...] | None = Field(strict=False, min_length=1, default=None)
    """Values of parallel.schedule to try, each with several values of parallel.waiting_weights;
    null = those that `auto` stands for."""
    micro_batch: Sizes | None = Field(strict=False)
    """Values of data.micro_batch to try; null = powers of two."""
    recompute: tuple[Recompute, ...] | None = Field(strict=False, min_length=1)
    """Values of recompute to try."""
    params: Sizes | None = Field(strict=False)
    """Values of sharding.params to try; null = divisors of the number of data-parallel ranks."""
    grads: Sizes | None = Field(strict=False)
    """Values of sharding.grads to try."""
    optimizer: Sizes | None = Field(strict=False)
    """Values of sharding.optimizer to try."""
    collectives: tuple[str, ...] | None = Field(strict=False, min_length=1)
    """Choices of `collectives` (message formats) to try, such as [plain,zeropp]; null = only the
    configured choice, because other formats may round the values that are sent."""
    survives: Literal["nothing", "rank", "node"] = "nothing"
    """What may be lost at once so that the other ranks still have a copy of every optimizer state
    (recovery.enabled): only layouts that survive it are planned. `nothing`: all layouts."""
    objective: Literal["throughput", "memory", "nodes"]
    """`throughput`: most tokens per second; `memory`: least peak memory; `nodes`: the fewest of
    `planner.nodes` that reach `planner.goal_tokens_per_second`. Of layouts within 1% of the fastest
    the one with the most free memory comes first."""
    goal_tokens_per_second: float | None = Field(gt=0)
    """For the objective `nodes`: the speed to reach, in tokens per second of all ranks together."""
    tokens: float | None = Field(gt=0, default=None)
    """Tokens of a whole training run, whose cost is predicted; null = no cost."""
    rows: int = Field(ge=1)
    """Number of layouts to print, the best first."""
    memory_share: float = Field(gt=0, le=1)
    """Share of the device memory that a layout may use."""
    engine: EngineConfig = EngineConfig()
    """The training program whose speed is predicted, a file of conf/engine."""

    @field_validator("nodes", mode="before")
    @classmethod
    def make_list(cls, value: Any) -> Any:
        """Accept `planner.nodes=128` as a list with one element."""
        return (value,) if type(value) is int else value
