"""The figure and the table of docs/sharding.md.

The bytes are computed from the presets in conf/sharding and the formulas in frontier_llm/geometry.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.generate.blocks import headed
from docs.generate.drawing import IMAGES
from frontier_lab.planning.state_layout import StateLayout, draw
from frontier_llm.cli.compose import Composed, groups
from frontier_llm.geometry.wire import Sent

FIGURE_OVERRIDES = (
    "parallel.pipeline=1",
    "launch.ranks=16",
    "launch.ranks_per_node=4",
    "sharding.params=2",
    "sharding.grads=4",
    "sharding.optimizer=8",
)
"""Layout that the figure shows: 16 data ranks on 4 nodes."""
PRESET_OVERRIDES = (
    "parallel.pipeline=1",
    "launch.ranks=32",
    "launch.ranks_per_node=8",
    "precision=bf16",
    "data.micro_batch=1",
    "data.global_batch=128",
    "collectives.pairwise=false",
)
"""Layout of the table of presets: 32 data ranks on 4 nodes, 4 micro-batches, messages as on a
GPU."""
COLLECTIVES = ("gather_params", "reduce_grads", "reduce_states", "refresh_params")
"""Columns of the table of presets: the collectives of sharded data parallelism."""


def images() -> dict[Path, str]:
    """Return the page's figure."""
    return {IMAGES / "sharding_2_4_8.svg": draw(_layout(*FIGURE_OVERRIDES))}


@headed(
    "`sharding=`", "params, grads, optimizer", "kept", *(f"`{name}`" for name in COLLECTIVES),
    "sent", "leaves a node",
)  # fmt: skip
def presets() -> Iterator[list[str]]:
    """Yield the bytes per element for each file of conf/sharding, most bytes kept first.

    The files of AMSP are left out, because each of them is meant for a single model.
    """
    names = [name for name in groups()["sharding"] if not name.startswith("amsp")]
    layouts = [_layout(*PRESET_OVERRIDES, f"sharding={name}") for name in names]
    for layout in sorted(layouts, key=_kept, reverse=True):
        yield [f"`{layout.config.sharding.name}`", *_preset(layout)]


@cache
def _layout(*overrides: str) -> StateLayout:
    return StateLayout.of(Composed.of(overrides).config)


def _preset(layout: StateLayout) -> Iterator[str]:
    """Yield the cells of the table of presets after the name."""
    factors, by_rank = layout.factors, _sent(layout)
    yield f"{factors.params}, {factors.grads}, {factors.optimizer}"
    yield _number(_kept(layout))
    of_rank_0 = by_rank[0]
    yield from (_number(of_rank_0.get(name, Sent()).total) for name in COLLECTIVES)
    yield _number(sum(sent.total for sent in of_rank_0.values()))
    of_node_0 = by_rank[: layout.grid.ranks_per_node]
    yield _number(sum(bytes_.network for of_rank in of_node_0 for bytes_ in of_rank.values()))


def _kept(layout: StateLayout) -> float:
    """Return the bytes that a rank keeps per element of the buffer."""
    return sum(layout.stored().values()) / layout.elements


def _sent(layout: StateLayout) -> list[dict[str, Sent]]:
    """Return the bytes that ranks send in a step, per element of a buffer and by collective."""
    size = layout.factors.multiple()  # a small buffer: bytes per element do not depend on its size
    return [
        {name: sent * (1 / size) for name, sent in layout.traffic.unit(rank, size).items()}
        for rank in layout.ranks
    ]


def _number(value: float) -> str:
    return f"{value:.2f}" if value else "0"


PAGES = {"docs/sharding.md": {"presets": presets}}
