"""Describe the model states of one pipeline stage, for `frontier-llm explain-layout`."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from frontier_lab.planning.state_traffic import StateTraffic
from frontier_lab.planning.unit_gathers import count_gathers
from frontier_llm.config import RunConfig
from frontier_llm.config.rules import data_size
from frontier_llm.geometry.communicators import Communicator, communicators, tied_stages
from frontier_llm.geometry.grid import Coordinates, Grid
from frontier_llm.geometry.partition import DIGITS, Factors
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.state_memory import feedback_bytes
from frontier_llm.geometry.wire import Sent
from frontier_llm.planner.candidate import ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.memory import STATES

MOST_RANKS = 64
"""Number of data ranks that are drawn at most."""
ROW, GAP, TOP, MARGIN = 22, 14, 96, 16
"""Height of a row, gap between nodes, top of the first row, and outer margin, in pixels."""
LABELS, BAR, BETWEEN = 168, 220, 26
"""Width of the labels, of a bar, and of the space between two bars, in pixels."""
COLUMNS = (
    ("parameters", "#2f6db5", "#e4edf7"),
    ("gradients", "#c8780a", "#faeeda"),
    ("optimizer states", "#2c8a4b", "#e1f2e7"),
)
"""Model states, with the colours of the part that a rank stores and of the whole buffer."""
LEFTS = [MARGIN + LABELS + column * (BAR + BETWEEN) for column in range(len(COLUMNS))]


@dataclass(frozen=True)
class StateLayout:
    """The model states of the pipeline stage with the most parameters."""

    config: RunConfig
    resolved: ResolvedLayout
    stage: int
    units: Mapping[str, int]
    """Elements of the flat buffer of each sharding unit (embedding, layer or head) on one tensor
    rank, padding included."""

    @classmethod
    def of(cls, config: RunConfig) -> "StateLayout":
        """Resolve a configuration on the ranks for which it is planned, else on one machine.

        A global batch that the replicas cannot share equally is rounded up.
        """
        ranks, ranks_per_node = ranks_to_plan(config)
        if config.launch.nodes is None and not config.planner.nodes:
            ranks_per_node = config.launch.ranks_per_node or ranks
        config = _with_whole_micro_batches(config, ranks)
        config = choose(config, ranks, ranks_per_node)
        layout = ResolvedLayout.resolve(config, ranks, ranks_per_node)
        unit_sizes = [layout.unit_sizes(stage) for stage in range(layout.grid.pipeline)]
        fullest = max(
            range(layout.grid.pipeline), key=lambda stage: sum(unit_sizes[stage].values())
        )
        return cls(config, layout, fullest, unit_sizes[fullest])

    @property
    def grid(self) -> Grid:
        """All ranks of the layout."""
        return self.resolved.grid

    @property
    def factors(self) -> Factors:
        """The sharding factors."""
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
        gathers = count_gathers(self.resolved, self.stage)
        buffers = self.resolved.unit_layouts(self.stage)
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


def _with_whole_micro_batches(config: RunConfig, ranks: int) -> RunConfig:
    """Round the global batch up to a number of samples that the layout can run."""
    replicas = max(1, data_size(config, ranks))
    multiple = replicas * config.data.micro_batch
    batch = -(-config.data.global_batch // multiple) * multiple
    if config.parallel.chunks > 1:  # at least one micro-batch per stage
        batch = max(batch, multiple * config.parallel.pipeline)
    return config.changed("data", global_batch=batch)


def draw(layout: StateLayout) -> str:
    """Draw as SVG which part of a flat buffer each data rank stores; a box is a node.

    `frontier-llm explain-layout --svg FILE` writes this drawing. At most 64 ranks are drawn.
    """
    ranks = range(min(layout.factors.data, MOST_RANKS))
    nodes = [list(members) for _, members in groupby(ranks, layout.node)]
    height = TOP + len(ranks) * ROW + len(nodes) * GAP + MARGIN
    width = LEFTS[-1] + BAR + BETWEEN
    body, top = list(_heading(layout.factors)), TOP
    for members in nodes:
        body.append(
            f"<rect x='{MARGIN}' y='{top - 3}' width='{width - 2 * MARGIN}' "
            f"height='{len(members) * ROW + 6}' rx='5' fill='none' stroke='#999999'/>"
        )
        for rank in members:
            body += _row(layout.factors, rank, top)
            top += ROW
        top += GAP
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' font-family='Helvetica, Arial, sans-serif'>\n"
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _heading(factors: Factors) -> Iterator[str]:
    title = f"Parts of one flat buffer that each of {factors.data} data ranks stores"
    yield _text(MARGIN, 28, title, "#222222", 16, " font-weight='bold'")
    subtitle = f"{factors.data // factors.optimizer} replicas of all states; a box is a node"
    yield _text(MARGIN, 48, subtitle, "#555555")
    yield from _labels(TOP - 12, ["rank", *(digit[0] for digit in DIGITS)], "#555555")
    numbers = (factors.params, factors.grads, factors.optimizer)
    for left, (name, colour, _), factor in zip(LEFTS, COLUMNS, numbers, strict=True):
        words = f"{name} over {factor} rank{'s' * (factor > 1)}"
        yield _text(left, TOP - 12, words, colour, 13, " font-weight='bold'")


def _row(factors: Factors, rank: int, top: int) -> Iterator[str]:
    size = factors.padded(1)
    yield from _labels(top + 15, [rank, *factors.digits(rank)], "#222222")
    box = f"y='{top + 3}' height='{ROW - 6}' rx='2'"
    numbers = (factors.params, factors.grads, factors.optimizer)
    for left, (_, colour, background), ranks in zip(LEFTS, COLUMNS, numbers, strict=True):
        interval = factors.interval(size, rank, ranks)
        start, length = interval.start * BAR / size, interval.length * BAR / size
        yield f"<rect x='{left}' {box} width='{BAR}' fill='{background}'/>"
        yield f"<rect x='{left + start:.2f}' {box} width='{max(length, 1.5):.2f}' fill='{colour}'/>"


def _labels(baseline: int, words: Sequence[object], colour: str) -> Iterator[str]:
    """Yield the cells of a line: a rank and its digits, or their titles."""
    for index, word in enumerate(words):
        left = MARGIN + 8 if index == 0 else MARGIN + 40 + 24 * index
        yield _text(left, baseline, str(word), colour)


def _text(
    left: int, baseline: int, words: str, colour: str, size: int = 12, weight: str = ""
) -> str:
    style = f"font-size='{size}'{weight} fill='{colour}'"
    return f"<text x='{left}' y='{baseline}' {style}>{words}</text>"
