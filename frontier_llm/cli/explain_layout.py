"""Show which rank holds which model states: `frontier-llm explain-layout [key=value ...]`.

Overrides as for train; `launch.ranks` and `launch.ranks_per_node` set the number of ranks and of
ranks per node. Prints the pipeline stage that has most elements. `--svg FILE` draws it instead.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from frontier_llm.cli.compose import compose
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import new_file, tool_parser
from frontier_llm.cli.plain_table import plain_table
from frontier_llm.geometry.partition import DIGITS, Digit, Interval
from frontier_llm.planner.layout_svg import draw
from frontier_llm.planner.state_layout import StateLayout
from frontier_llm.units import GIB, format_bytes, format_count

NARROW_BAR, WIDE_BAR = 16, 32
"""Width of a bar in characters, on narrow and on wide terminals. A bar is the complete buffer."""
COLUMNS_FOR_WIDE_BARS = 128
MOST_ROWS = 32
MOST_GROUPS = 3
MOST_MEMBERS = 6
STATES = (("parameters", "blue"), ("gradients", "yellow"), ("optimizer", "green"))
FLOWS: dict[Digit, str] = {
    "params": "gather parameters, reduce gradients",
    "grads": "reduce gradients, refresh parameters",
    "optimizer": "reduce states, refresh parameters",
    "replica": "reduce states",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or draw the layout of a configuration; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--svg", type=new_file, metavar="FILE", help="draw the layout to a file instead"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for train")
    options = parser.parse_intermixed_args(arguments)
    layout = StateLayout.of(compose(options.overrides))
    if options.svg:
        options.svg.write_text(draw(layout))
        return 0
    console = wide_console()
    bar = WIDE_BAR if console.width >= COLUMNS_FOR_WIDE_BARS else NARROW_BAR
    for part in explain(layout, bar):
        console.print(part)
        console.print()
    return 0


def explain(layout: StateLayout, bar: int = NARROW_BAR) -> Iterator[RenderableType]:
    """Yield the output: a summary, and tables of shards, groups, bytes sent and memory."""
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
        f"{grid.ranks_per_node} ranks per node. Stage {layout.stage}: {len(layout.units)} units, ",
        f"{format_count(layout.elements)} elements per tensor rank.\nOne replica is sharded over: ",
        (f"parameters {factors.params}", STATES[0][1]),
        ", ",
        (f"gradients {factors.grads}", STATES[1][1]),
        ", ",
        (f"optimizer states {factors.optimizer}", STATES[2][1]),
        f" of {factors.data} data ranks.",
    )


def _bars(layout: StateLayout, bar: int) -> Table:
    factors = layout.factors
    columns = [
        "rank",
        "node",
        " ".join(digit[0] for digit in DIGITS),
        *(f"[{colour}]{name}" for name, colour in STATES),
    ]
    table = plain_table(
        "What each data rank holds of a buffer (a line is a node's border; p g o r are the rank's "
        "params, grads, optimizer and replica digits)",
        columns,
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
    for digit in DIGITS:
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
    batch, count = layout.config.data.global_batch, layout.resolved.micro_batches
    title = f"Sent per rank and step of {batch} samples (micro-batches: {count})"
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
    table = plain_table("Kept per rank", ["state", "bytes"])
    stored = layout.stored()
    for name, size in stored.items():
        table.add_row(name, format_bytes(size))
    device = layout.config.cluster.device
    table.add_section()
    table.add_row("total", format_bytes(sum(stored.values())), style="bold")
    table.add_row(f"memory of {device.name}", format_bytes(device.memory_gib * GIB))
    return table


def _some(items: Sequence[object], most: int) -> str:
    """Return the first items as text, with an ellipsis if there are more."""
    text = " ".join(map(str, items[:most]))
    return f"{text} ..." if len(items) > most else text
