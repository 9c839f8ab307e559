"""Write the figure and the tables of docs/sharding.md.

The bytes are computed from the presets in conf/sharding and the formulas in frontier_llm/geometry.
`python -m docs.generate.sharding_page` reports whether the page is out of date, and `--write`
writes it.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from docs.generate.marked_page import filled, keep_current
from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.wire import Sent, all_reduce_bytes, gather_bytes
from frontier_llm.planner.layout_svg import draw
from frontier_llm.planner.state_layout import StateLayout

PAGE = CONF.parent / "docs" / "sharding.md"
FIGURE = CONF.parent / "docs" / "images" / "sharding_2_4_8.svg"
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
AMSP_CHOICES = {
    "amsp_llama_7b": (1, 1, 8),
    "amsp_llama_13b": (4, 4, 8),
    "amsp_llama_30b": (8, 8, 32),
}
"""The factors that AMSP's search found for 8 to 1024 GPUs (arXiv:2311.00257): the numbers of ranks
over which parameters, gradients and optimizer states are sharded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its figure, or report which is out of date; return the exit code."""
    return keep_current(__doc__, "docs.generate.sharding_page", arguments, files)


def files() -> dict[Path, str]:
    """Return the page and its figure."""
    text = filled(PAGE.read_text(), {"presets": presets(), "amsp": amsp()})
    return {PAGE: text, FIGURE: figure()}


def figure() -> str:
    """Draw the page's figure."""
    return draw(_layout(*FIGURE_OVERRIDES))


def presets() -> Iterator[str]:
    """Yield the table of bytes per element for each file of conf/sharding, most bytes kept first.

    The files of AMSP are left out, because each of them is meant for a single model.
    """
    yield (
        "| `sharding=` | params, grads, optimizer | kept | "
        + " | ".join(f"`{name}`" for name in COLLECTIVES)
        + " | sent | leaves a node |"
    )
    yield "|" + "---|" * (len(COLLECTIVES) + 5)
    general = [name for name in groups()["sharding"] if not name.startswith("amsp")]
    layouts = [_layout(*PRESET_OVERRIDES, f"sharding={name}") for name in general]
    for layout in sorted(layouts, key=_kept, reverse=True):
        yield f"| `{layout.config.sharding.name}` | " + " | ".join(_preset(layout)) + " |"


def amsp() -> Iterator[str]:
    """Yield the table that compares the bytes sent per element with those of AMSP."""
    yield (
        "| model | params, grads, optimizer | ranks | micro-batches | AMSP's flows | here, "
        "`collectives=plain` | `collectives=bf16` |"
    )
    yield "|" + "---|" * 7
    for experiment, numbers in AMSP_CHOICES.items():
        for ranks in (64, 1024):
            yield f"| `{experiment}` | " + " | ".join(_choice(experiment, numbers, ranks)) + " |"


def amsp_elements(factors: Factors, micro_batches: int) -> float:
    """Return what a rank sends in a step of AMSP, relative to the size of a buffer.

    Parameters are sharded over p ranks, gradients over g, optimizer states over o, and there are D
    data ranks. In each micro-batch AMSP (arXiv:2311.00257) makes two gathers and a reduce-scatter
    over p ranks, and an all-reduce of 1/p of the buffer. This all-reduce is over g/p ranks in all
    micro-batches but the last, and over D/p ranks in the last one. At the end of the step there are
    o/p broadcasts of 1/o of the buffer over o/p ranks, in which data is passed from rank to rank.
    A rank passes on all of them but one, for which it is the last rank.
    """
    p, g, o, d = factors.params, factors.grads, factors.optimizer, factors.data
    return (
        micro_batches * 3 * gather_bytes(1, p)
        + (micro_batches - 1) * all_reduce_bytes(1 / p, g // p)
        + all_reduce_bytes(1 / p, d // p)
        + (o // p - 1) / o
    )


@cache
def _layout(*overrides: str) -> StateLayout:
    return StateLayout.of(compose(overrides))


def _preset(layout: StateLayout) -> Iterator[str]:
    """Yield the cells of the table of presets after the name."""
    factors, sent = layout.factors, _sent(layout)
    yield f"{factors.params}, {factors.grads}, {factors.optimizer}"
    yield _number(_kept(layout))
    of_rank_0 = sent[0]
    yield from (_number(_all_links(of_rank_0.get(name, Sent()))) for name in COLLECTIVES)
    yield _number(sum(map(_all_links, of_rank_0.values())))
    of_node_0 = sent[: layout.grid.ranks_per_node]
    yield _number(sum(bytes_.network for of_rank in of_node_0 for bytes_ in of_rank.values()))


def _kept(layout: StateLayout) -> float:
    """Return the bytes that a rank keeps per element of the buffer."""
    return sum(layout.stored().values()) / layout.elements


def _choice(experiment: str, numbers: tuple[int, int, int], ranks: int) -> Iterator[str]:
    """Yield the cells of AMSP's table after the name; `numbers` are the factors."""
    keys = ("params", "grads", "optimizer")
    chosen = [f"sharding.{key}={number}" for key, number in zip(keys, numbers, strict=True)]
    where = [f"experiment={experiment}", f"launch.ranks={ranks}", "launch.ranks_per_node=8"]
    layouts = [_layout(*where, *chosen, f"collectives={preset}") for preset in ("plain", "bf16")]
    first = layouts[0]
    yield ", ".join(map(str, numbers))
    yield str(ranks)
    yield str(first.resolved.micro_batches)
    yield _number(2 * amsp_elements(first.factors, first.resolved.micro_batches))
    for layout in layouts:
        yield _number(sum(map(_all_links, _sent(layout, ranks=1)[0].values())))


def _sent(layout: StateLayout, ranks: int | None = None) -> list[dict[str, Sent]]:
    """Return the bytes that ranks send in a step, per element of a buffer and by collective.

    Args:
        layout: the layout.
        ranks: number of ranks to count for, from the first; None: all ranks.
    """
    size = layout.factors.multiple()  # a small buffer: bytes per element do not depend on its size
    return [
        {name: sent * (1 / size) for name, sent in layout.traffic.unit(rank, size).items()}
        for rank in layout.ranks[:ranks]
    ]


def _all_links(sent: Sent) -> float:
    """Return the bytes sent inside a node and between nodes together."""
    return sent.total


def _number(value: float) -> str:
    return f"{value:.2f}" if value else "0"


if __name__ == "__main__":
    sys.exit(run_command(main))
