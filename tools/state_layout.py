"""How a configuration cuts the model states of one pipeline stage: sizes, bytes, memory."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.rules import check, data_size
from frontier_llm.geometry.formats import StateFormats
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.layout import make_grid, resolve_factors
from frontier_llm.geometry.message_memory import feedback_bytes, rounds_refresh
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.state_memory import needs_master, state_bytes
from frontier_llm.geometry.state_traffic import StateTraffic
from frontier_llm.geometry.units import gathers_by_pass, unit_elements, unit_layouts
from frontier_llm.geometry.wire import Sent


@dataclass(frozen=True)
class StateLayout:
    """The fullest stage of a run: who holds what of it, and what it sends."""

    config: RunConfig
    grid: Grid
    factors: Factors
    stage: int
    units: Mapping[str, int]
    """Elements of each unit's flat buffer on one tensor rank, padding included."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "StateLayout":
        """Lay out composed values over `launch.ranks` ranks.

        A batch that the replicas do not divide is rounded up.

        Raises:
            ConfigError: the configuration is wrong, or cannot be laid out.
        """
        config = _with_whole_micro_batches(decode(values))
        ranks = config.launch.ranks
        check(config, ranks)
        grid = make_grid(config, ranks, config.launch.ranks_per_node or ranks)
        factors = resolve_factors(config, grid)
        stages = [unit_elements(config, stage, factors) for stage in range(grid.pipeline)]
        fullest = max(range(grid.pipeline), key=lambda stage: sum(stages[stage].values()))
        return cls(config, grid, factors, fullest, stages[fullest])

    @property
    def elements(self) -> int:
        """Elements of all units together."""
        return sum(self.units.values())

    @property
    def micro_batches(self) -> int:
        """What a replica computes in a step, one after the other."""
        return self.config.data.global_batch // (self.grid.data * self.config.data.micro_batch)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a parameter that the model computes with; `auto` counts as bf16."""
        return 4 if self.config.precision.name == "fp32" else 2

    @property
    def ranks(self) -> Sequence[int]:
        """The data ranks of the stage, as ranks of the grid."""
        return self.grid.data_group(self.grid.rank(Coordinates(0, 0, self.stage)))

    def node(self, data_rank: int) -> int:
        """Return the node of a data rank of the stage."""
        return self.grid.node(self.ranks[data_rank])

    @property
    def traffic(self) -> StateTraffic:
        """What its ranks send of model states in a step."""
        return StateTraffic(
            self.grid,
            self.factors,
            self.micro_batches,
            params_bytes=self.compute_bytes,
            formats=StateFormats.at(self.config.collectives),
        )

    def sent(self) -> dict[str, list[Sent]]:
        """Return what each data rank of the stage sends in a step, by collective."""
        how_often = gathers_by_pass(self.config, self.stage, self.factors, self.micro_batches)
        layouts = unit_layouts(self.config, self.stage, self.factors)
        alike = Counter((one.size, one.decayed, how_often[unit]) for unit, one in layouts.items())
        by_name: defaultdict[str, list[Sent]] = defaultdict(
            lambda: [Sent() for _ in range(self.grid.data)]
        )
        for (elements, decayed, times), count in alike.items():
            for data_rank, rank in enumerate(self.ranks):
                for name, one in self.traffic.unit(rank, elements, times, decayed).items():
                    by_name[name][data_rank] += Sent(count * one.intra, count * one.inter)
        return dict(by_name)

    def stored(self) -> dict[str, int]:
        """Return the bytes a rank of the stage keeps from step to step, by category."""
        formats = StateFormats.at(self.config.collectives)
        rounds = rounds_refresh(formats, self.factors, self.compute_bytes)
        master = needs_master(self.compute_bytes, rounds)
        held = state_bytes(self.elements, self.factors, self.compute_bytes, master)
        kept = feedback_bytes(self.config.collectives, self.grid, self.factors, self.elements)
        return held | ({"feedback": kept} if kept else {})


def _with_whole_micro_batches(config: RunConfig) -> RunConfig:
    replicas = max(1, data_size(config, config.launch.ranks))
    together = replicas * config.data.micro_batch
    if config.parallel.chunks > 1:
        together *= config.parallel.pipeline
    batch = -(-config.data.global_batch // together) * together
    data = config.data.model_copy(update={"global_batch": batch})
    return config.model_copy(update={"data": data})
