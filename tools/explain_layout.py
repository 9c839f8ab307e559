"""Show who holds what of the model states: `python tools/explain_layout.py [key=value ...]`.

Takes the overrides of train.py; `launch.ranks` and `launch.ranks_per_node` say how many ranks and
where nodes end. Prints the fullest pipeline stage. `--svg FILE` draws it instead.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.geometry.partition import Digit, Interval
from frontier_llm.units import GIB, format_bytes, format_count
from tools.compose import compose
from tools.console import wide_console
from tools.layout_svg import draw
from tools.options import ending, new_file, tool_parser
from tools.plain_table import plain_table
from tools.state_layout import StateLayout

NARROW_BAR, WIDE_BAR = 16, 32
"""Characters of a bar, which is the whole buffer: on 80 columns, and where there is room."""
ROOM_FOR_WIDE_BARS = 128
MOST_ROWS = 32
MOST_GROUPS = 3
MOST_MEMBERS = 6
STATES = (("parameters", "blue"), ("gradients", "yellow"), ("optimizer", "green"))
FLOWS: dict[Digit, str] = {
    "a": "gather parameters, reduce gradients",
    "b": "reduce gradients, refresh parameters",
    "c": "reduce states, refresh parameters",
    "d": "reduce states",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or draw the layout of a configuration; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("--svg", type=new_file, metavar="FILE", help="draw it to a file instead")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    options = parser.parse_intermixed_args(arguments)
    layout = StateLayout.of(compose(options.overrides))
    if options.svg:
        options.svg.write_text(draw(layout))
        return 0
    console = wide_console()
    bar = WIDE_BAR if console.width >= ROOM_FOR_WIDE_BARS else NARROW_BAR
    for part in explain(layout, bar):
        console.print(part)
        console.print()
    return 0


def explain(layout: StateLayout, bar: int = NARROW_BAR) -> Iterator[RenderableType]:
    """Yield the parts of the page: a summary, the bars, the groups, the bytes, the memory."""
    yield _summary(layout)
    yield _bars(layout, bar)
    yield _groups(layout)
    yield _bytes(layout)
    yield _memory(layout)


def _summary(layout: StateLayout) -> Text:
    grid, factors = layout.grid, layout.factors
    return Text.assemble(
        (f"{layout.config.model.name} on {grid.size} ranks", "bold"),
        f": tensor {grid.tensor} x data {grid.data} x pipeline {grid.pipeline}, ",
        f"{grid.ranks_per_node} ranks a node. Stage {layout.stage}: {len(layout.units)} units, ",
        f"{format_count(layout.elements)} elements a tensor rank.\nOne copy is cut over: ",
        (f"parameters {factors.params}", STATES[0][1]),
        ", ",
        (f"gradients {factors.grads}", STATES[1][1]),
        ", ",
        (f"optimizer states {factors.optimizer}", STATES[2][1]),
        f" of {factors.data} data ranks.",
    )


def _bars(layout: StateLayout, bar: int) -> Table:
    factors = layout.factors
    columns = ["rank", "node", "a b c d", *(f"[{colour}]{name}" for name, colour in STATES)]
    table = plain_table(
        "What each data rank holds of a buffer (a line is a node's border)", columns
    )
    size = factors.padded(1)
    shown = min(factors.data, MOST_ROWS)
    for rank in range(shown):
        intervals = (
            factors.params_interval(size, rank),
            factors.grads_interval(size, rank),
            factors.optimizer_interval(size, rank),
        )
        table.add_row(
            f"{rank}",
            f"{layout.node(rank)}",
            " ".join(map(str, factors.digits(rank))),
            *(_bar(i, size, bar, c) for i, (_, c) in zip(intervals, STATES, strict=True)),
            end_section=rank + 1 < shown and layout.node(rank) != layout.node(rank + 1),
        )
    if shown < factors.data:
        table.caption = f"and {factors.data - shown} more data ranks"
    return table


def _bar(interval: Interval, size: int, width: int, colour: str) -> Text:
    first = interval.start * width // size
    last = max(first + 1, interval.stop * width // size)
    return Text.assemble(
        ("·" * first, "dim"), ("█" * (last - first), colour), ("·" * (width - last), "dim")
    )


def _groups(layout: StateLayout) -> Table:
    factors = layout.factors
    columns = ["digit", "ranks", "groups", "across nodes", "what flows"]
    table = plain_table("Groups: data ranks that differ in one digit", columns)
    for digit in get_args(Digit):
        groups = sorted({factors.group(digit, rank) for rank in range(factors.data)})
        if factors.width(digit) == 1:
            table.add_row(digit, "1", "each alone", "", "", style="dim")
            continue
        crossing = sum(len({layout.node(rank) for rank in group}) > 1 for group in groups)
        table.add_row(
            digit,
            str(factors.width(digit)),
            _some([f"({_some(group, MOST_MEMBERS)})" for group in groups], MOST_GROUPS),
            f"{crossing} of {len(groups)}",
            FLOWS[digit],
        )
    return table


def _bytes(layout: StateLayout) -> Table:
    columns = ["collective", "in the node", "between nodes", "between, busiest rank"]
    batch = layout.config.data.global_batch
    title = f"Sent by a rank in a step of {batch} samples (micro-batches: {layout.micro_batches})"
    table = plain_table(title, columns)
    for name, sent in layout.sent().items():
        table.add_row(
            name,
            format_bytes(sum(s.intra for s in sent) / len(sent)),
            format_bytes(sum(s.inter for s in sent) / len(sent)),
            format_bytes(max(s.inter for s in sent)),
        )
    if layout.config.precision.name == "auto":
        table.caption = "precision=auto is counted as bf16"
    return table


def _memory(layout: StateLayout) -> Table:
    table = plain_table("Kept by a rank", ["state", "bytes"])
    stored = layout.stored()
    for name, size in stored.items():
        table.add_row(name, format_bytes(size))
    device = layout.config.cluster.device
    table.add_section()
    table.add_row("all", format_bytes(sum(stored.values())), style="bold")
    table.add_row(f"of {device.name}", format_bytes(device.memory_gib * GIB))
    return table


def _some(items: Sequence[object], most: int) -> str:
    """Write the first items, and that there are more."""
    text = " ".join(map(str, items[:most]))
    return f"{text} ..." if len(items) > most else text


if __name__ == "__main__":
    sys.exit(ending(main))
