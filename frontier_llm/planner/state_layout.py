"""Describe the model states of one pipeline stage: how much each rank stores and sends.

`frontier-llm explain-layout` prints and draws this description.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.rules import data_size
from frontier_llm.geometry.communicators import Communicator, communicators, tied_stages
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.message_memory import feedback_bytes
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_traffic import StateTraffic
from frontier_llm.geometry.wire import Sent
from frontier_llm.planner.choice import choose
from frontier_llm.planner.memory import STATES


@dataclass(frozen=True)
class StateLayout:
    """The model states of the pipeline stage with the most parameters."""

    config: RunConfig
    resolved: ResolvedLayout
    stage: int
    """Index of the stage."""
    units: Mapping[str, int]
    """Elements of the flat buffer of each sharding unit (embedding, layer or head) on one tensor
    rank, padding included."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "StateLayout":
        """Resolve a composed configuration on `launch.ranks` ranks.

        A global batch that the replicas cannot share equally is rounded up.

        Raises:
            ConfigError: the configuration is wrong, or cannot run on these ranks.
        """
        config = _with_whole_micro_batches(decode(values))
        ranks = config.launch.ranks
        ranks_per_node = config.launch.ranks_per_node or ranks
        config = choose(config, ranks, ranks_per_node)
        layout = ResolvedLayout.resolve(config, ranks, ranks_per_node)
        unit_sizes = [layout.unit_sizes(stage) for stage in range(layout.grid.pipeline)]
        fullest = max(
            range(layout.grid.pipeline), key=lambda stage: sum(unit_sizes[stage].values())
        )
        return cls(config, layout, fullest, unit_sizes[fullest])

    @property
    def grid(self) -> Grid:
        """The tensor x pipeline x data grid of all ranks."""
        return self.resolved.grid

    @property
    def factors(self) -> Factors:
        """The sharding factors: over how many data-parallel ranks each model state is sharded."""
        return self.resolved.factors

    @property
    def elements(self) -> int:
        """Elements of all units together."""
        return sum(self.units.values())

    @property
    def ranks(self) -> Sequence[int]:
        """The rank in the grid of each data rank of the stage, for tensor coordinate 0."""
        return self.grid.data_group(self.grid.rank(Coordinates(0, 0, self.stage)))

    def node(self, data_rank: int) -> int:
        """Return the node on which a data rank of the stage runs."""
        return self.grid.node(self.ranks[data_rank])

    @property
    def traffic(self) -> StateTraffic:
        """Counts the bytes of model states that the ranks of the stage send in a step."""
        layout = self.resolved
        return StateTraffic(
            layout.grid,
            layout.factors,
            layout.micro_batches,
            params_bytes=layout.compute_bytes,
            formats=layout.formats,
        )

    def sent(self) -> dict[str, list[Sent]]:
        """Return the bytes that each data rank of the stage sends per step, by kind of flow."""
        gathers, buffers = self.resolved.gathers(self.stage), self.resolved.unit_layouts(self.stage)
        # units with equal buffers and equally many gathers send the same bytes
        equal_units = Counter(
            (buffer.size, buffer.decayed, buffer.bounds, gathers[unit])
            for unit, buffer in buffers.items()
        )
        by_name: defaultdict[str, list[Sent]] = defaultdict(
            lambda: [Sent() for _ in range(self.grid.data)]
        )
        for (elements, decayed, bounds, unit_gathers), count in equal_units.items():
            for data_rank, rank in enumerate(self.ranks):
                of_unit = self.traffic.unit(rank, elements, unit_gathers, decayed, bounds)
                for name, sent in of_unit.items():
                    by_name[name][data_rank] += sent * count
        return dict(by_name)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The communicators of the stage's first rank."""
        return communicators(self.resolved, self.stage, tied_stages(self.resolved))

    def stored(self) -> dict[str, int]:
        """Return the bytes that a rank of the stage keeps from step to step, by category."""
        layout = self.resolved
        stored = layout.state_bytes(self.stage)
        stored = {name: count for name, count in stored.items() if name in STATES}
        feedback = feedback_bytes(layout.collectives, layout.grid, layout.factors, self.elements)
        return stored | ({"feedback": feedback} if feedback else {})


def _with_whole_micro_batches(config: RunConfig) -> RunConfig:
    """Round the global batch up to a number of samples that the layout can run."""
    replicas = max(1, data_size(config, config.launch.ranks))
    multiple = replicas * config.data.micro_batch
    batch = -(-config.data.global_batch // multiple) * multiple
    if config.parallel.chunks > 1:  # at least one micro-batch per stage
        batch = max(batch, multiple * config.parallel.pipeline)
    data = config.data.model_copy(update={"global_batch": batch})
    return config.model_copy(update={"data": data})
