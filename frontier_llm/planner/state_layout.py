"""The model states of one pipeline stage: which rank stores and sends how much of them."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.rules import data_size
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.message_memory import feedback_bytes, refresh_is_lossy
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import needs_master, state_bytes
from frontier_llm.geometry.state_traffic import StateTraffic
from frontier_llm.geometry.wire import Sent


@dataclass(frozen=True)
class StateLayout:
    """The model states of the stage that holds most of them."""

    config: RunConfig
    resolved: ResolvedLayout
    stage: int
    units: Mapping[str, int]
    """Elements of each unit's flat buffer on one tensor rank, padding included."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "StateLayout":
        """Resolve composed values on `launch.ranks` ranks.

        A batch that the replicas cannot share equally is rounded up.

        Raises:
            ConfigError: the configuration is wrong, or cannot be laid out.
        """
        config = _with_whole_micro_batches(decode(values))
        ranks = config.launch.ranks
        layout = ResolvedLayout.resolve(config, ranks, config.launch.ranks_per_node or ranks)
        stages = [layout.unit_sizes(stage) for stage in range(layout.grid.pipeline)]
        fullest = max(range(layout.grid.pipeline), key=lambda stage: sum(stages[stage].values()))
        return cls(config, layout, fullest, stages[fullest])

    @property
    def grid(self) -> Grid:
        """All ranks."""
        return self.resolved.grid

    @property
    def factors(self) -> Factors:
        """Over how many data ranks one copy of each model state is cut."""
        return self.resolved.factors

    @property
    def elements(self) -> int:
        """Elements of all units together."""
        return sum(self.units.values())

    @property
    def ranks(self) -> Sequence[int]:
        """The data ranks of the stage, as ranks of the grid."""
        return self.grid.data_group(self.grid.rank(Coordinates(0, 0, self.stage)))

    def node(self, data_rank: int) -> int:
        """Return the node on which a data rank of the stage runs."""
        return self.grid.node(self.ranks[data_rank])

    @property
    def traffic(self) -> StateTraffic:
        """Bytes that the stage's ranks send of model states in a step."""
        layout = self.resolved
        return StateTraffic(
            layout.grid,
            layout.factors,
            layout.micro_batches,
            params_bytes=layout.compute_bytes,
            formats=layout.formats,
        )

    def sent(self) -> dict[str, list[Sent]]:
        """Return what each data rank of the stage sends in a step, by collective."""
        gathers, layouts = self.resolved.gathers(self.stage), self.resolved.unit_layouts(self.stage)
        units = Counter((one.size, one.decayed, gathers[unit]) for unit, one in layouts.items())
        by_name: defaultdict[str, list[Sent]] = defaultdict(
            lambda: [Sent() for _ in range(self.grid.data)]
        )
        for (elements, decayed, times), count in units.items():
            for data_rank, rank in enumerate(self.ranks):
                for name, one in self.traffic.unit(rank, elements, times, decayed).items():
                    by_name[name][data_rank] += Sent(count * one.intra, count * one.inter)
        return dict(by_name)

    def stored(self) -> dict[str, int]:
        """Return the bytes a rank of the stage keeps from step to step, by category."""
        layout, compute_bytes = self.resolved, self.resolved.compute_bytes
        is_lossy = refresh_is_lossy(layout.formats, layout.factors, compute_bytes)
        master = needs_master(compute_bytes, is_lossy)
        held = state_bytes(self.elements, layout.factors, compute_bytes, master)
        kept = feedback_bytes(layout.collectives, layout.grid, layout.factors, self.elements)
        return held | ({"feedback": kept} if kept else {})


def _with_whole_micro_batches(config: RunConfig) -> RunConfig:
    replicas = max(1, data_size(config, config.launch.ranks))
    together = replicas * config.data.micro_batch
    if config.parallel.chunks > 1:
        together *= config.parallel.pipeline
    batch = -(-config.data.global_batch // together) * together
    data = config.data.model_copy(update={"global_batch": batch})
    return config.model_copy(update={"data": data})
