"""Show which rank holds which model states: `frontier-llm explain-layout [key=value ...]`.

Overrides are the same as for frontier-llm train. `launch.ranks` sets the number of ranks, and
`launch.ranks_per_node` the number per node. Prints the pipeline stage that has most elements.
`--svg FILE` draws it instead.

Parameters, gradients and optimizer states of a unit (usually one transformer layer) lie in flat
buffers. Three factors say over how many data ranks each kind of state is sharded. A data rank has
four digits that follow from the factors: params, grads, optimizer and replica. Ranks that differ in
one digit only form a process group (docs/sharding.md).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from frontier_lab.option_values import new_file, write_text
from frontier_lab.planning.state_layout import StateLayout, draw
from frontier_lab.predicted_run import assumed_cluster
from frontier_llm.cli.compose import configured
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import tool_parser
from frontier_llm.geometry.communicators import Communicator
from frontier_llm.geometry.partition import DIGITS, Digit, Hop, Interval
from frontier_llm.geometry.wire import Sent, level_labels
from frontier_llm.planner.memory import host_memory, runtime_bytes
from frontier_llm.units import GIB, counted, format_bytes, format_count

NARROW_BAR, WIDE_BAR = 16, 32
"""Characters of a bar, which shows one complete buffer, on narrow and on wide terminals."""
COLUMNS_FOR_WIDE_BARS = 128
"""A terminal with this number of characters per line is wide."""
MOST_ROWS = 32
"""Maximum number of ranks that are shown."""
MOST_GROUPS = 3
"""Maximum number of groups of a digit that are shown."""
MOST_MEMBERS = 6
"""Maximum number of ranks of a group that are shown."""
STATES = (("parameters", "blue"), ("gradients", "yellow"), ("optimizer", "green"))
"""Kinds of states and their colours."""
COLLECTIVES: dict[Digit, str] = {
    "params": "gather parameters, reduce gradients",
    "grads": "reduce gradients, refresh parameters",
    "optimizer": "reduce states, refresh parameters",
    "replica": "reduce states",
}
"""What the groups of a digit communicate. "Reduce states" sums the gradient shards for the
optimizer, and "refresh parameters" distributes the updated parameters."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or draw the layout of a configuration; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--svg", type=new_file, metavar="FILE", help="draw the layout to a file instead"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for train")
    options = parser.parse_intermixed_args(arguments)
    config = configured(options.overrides).config
    layout = StateLayout.of(config)
    if options.svg:
        write_text(options.svg, draw(layout), "--svg")
        print(options.svg)
        return 0
    console = wide_console()
    bar = WIDE_BAR if console.width >= COLUMNS_FOR_WIDE_BARS else NARROW_BAR
    if assumed := assumed_cluster(config, options.overrides):
        console.print(f"Cluster: {assumed[0]}; for another one {assumed[1]}\n", soft_wrap=True)
    for part in explain(layout, bar):
        console.print(part)
        console.print()
    return 0


def explain(layout: StateLayout, bar: int = NARROW_BAR) -> Iterator[RenderableType]:
    """Yield a summary, and tables of shards (with bars of `bar` characters), groups and bytes."""
    yield _summary(layout)
    yield _shards_table(layout, bar)
    yield _groups_table(layout)
    yield _sent_table(layout)
    yield _memory_table(layout)


def _summary(layout: StateLayout) -> Text:
    grid, factors, parallel = layout.grid, layout.factors, layout.config.parallel
    schedule = (
        f"\nPipeline schedule: {parallel.schedule}, {parallel.chunks} model chunks per stage; "
        f"parallel.waiting_weights={parallel.waiting_weights}."
    )
    return Text.assemble(
        (f"{layout.config.model.name} on {counted(grid.size, 'rank')}", "bold"),
        f": tensor {grid.tensor} x data {grid.data} x pipeline {grid.pipeline}, ",
        f"{counted(grid.ranks_per_node, 'rank')} per node. Stage {layout.stage}: "
        f"{counted(len(layout.units), 'unit')}, ",
        f"{format_count(layout.elements)} elements per tensor rank.\nOne replica is sharded over: ",
        (f"parameters {factors.params}", STATES[0][1]),
        ", ",
        (f"gradients {factors.grads}", STATES[1][1]),
        ", ",
        (f"optimizer states {factors.optimizer}", STATES[2][1]),
        f" of {factors.data} data ranks.",
        schedule if parallel.pipeline > 1 else "",
    )


def _shards_table(layout: StateLayout, bar: int) -> Table:
    factors = layout.factors
    columns = [
        "rank",
        "node",
        " ".join(digit[0] for digit in DIGITS),
        *(f"[{colour}]{name}" for name, colour in STATES),
    ]
    table = plain_table(
        "Part of a buffer that each data rank holds (a line separates nodes; p g o r are the "
        "digits params, grads, optimizer and replica of the rank)",
        columns,
    )
    size = factors.padded(1)
    shown = min(factors.data, MOST_ROWS)
    for rank in range(shown):
        widths = (factors.params, factors.grads, factors.optimizer)
        intervals = [factors.interval(size, rank, width) for width in widths]
        table.add_row(
            f"{rank}",
            f"{layout.node(rank)}",
            " ".join(map(str, factors.digits(rank))),
            *(
                _bar(interval, size, bar, colour)
                for interval, (_, colour) in zip(intervals, STATES, strict=True)
            ),
            end_section=rank + 1 < shown and layout.node(rank) != layout.node(rank + 1),
        )
    if shown < factors.data:
        table.caption = f"and {factors.data - shown} more data ranks"
    return table


def _bar(interval: Interval, size: int, width: int, colour: str) -> Text:
    """Draw an interval of a buffer of `size` elements as a bar of `width` characters."""
    first = interval.start * width // size
    last = max(first + 1, interval.stop * width // size)
    return Text.assemble(
        ("·" * first, "dim"), ("█" * (last - first), colour), ("·" * (width - last), "dim")
    )


def _groups_table(layout: StateLayout) -> Table:
    factors = layout.factors
    columns = ["digit", "ranks", "groups", "across nodes", "collectives"]
    table = plain_table("Groups: data ranks that differ in one digit", columns)
    for digit in DIGITS:
        if factors.width(digit) == 1:
            table.add_row(digit, "1", "each rank alone", "", "", style="dim")
        for hop in factors.collective_hops:
            if hop.digit == digit:
                table.add_row(*_hop_row(layout, hop))
    return table


def _hop_row(layout: StateLayout, hop: Hop) -> tuple[str, ...]:
    groups = sorted({hop.group(rank) for rank in range(layout.factors.data)})
    crossing = sum(len({layout.node(rank) for rank in group}) > 1 for group in groups)
    return (
        hop.digit,
        str(hop.width),
        _first([f"({_first(group, MOST_MEMBERS)})" for group in groups], MOST_GROUPS),
        f"{crossing} of {len(groups)}",
        COLLECTIVES[hop.digit],
    )


def _sent_table(layout: StateLayout) -> Table:
    flows = layout.sent()
    levels = level_labels(volume for of_ranks in flows.values() for volume in of_ranks)
    columns = ["collective", *levels.values(), "between nodes, busiest rank"]
    batch, count = layout.config.data.global_batch, layout.resolved.micro_batches
    title = f"Bytes sent per rank and step of {batch} samples (micro-batches: {count})"
    table = plain_table(title, columns)
    for name, sent in flows.items():
        mean = sum(sent, Sent()) * (1 / len(sent))
        table.add_row(
            name,
            *(format_bytes(mean.at(level)) for level in levels),
            format_bytes(max(of_rank.network for of_rank in sent)),
        )
    if layout.config.precision.name == "auto":
        table.caption = "precision=auto is counted as bf16"
    return table


def _memory_table(layout: StateLayout) -> Table:
    table = plain_table("Memory per rank", ["state", "bytes"])
    stored = layout.stored()
    for name, size in stored.items():
        table.add_row(name, format_bytes(size))
    device, created = layout.config.cluster.device, layout.communicators
    buffers = sum(each.buffer_bytes(device.calibration.channels) for each in created)
    runtime = runtime_bytes(device.calibration, buffers)
    runtime[f"communicators ({_names(created)})"] = runtime.pop("communicators")
    for name, size in runtime.items():
        table.add_row(name, format_bytes(size))
    table.add_section()
    total = sum(stored.values()) + sum(runtime.values())
    table.add_row("total", format_bytes(total), style="bold")
    table.add_row(f"memory of {device.name}", format_bytes(device.memory_gib * GIB))
    pool, copies = host_memory(layout.config, layout.resolved, layout.stage, stored)
    table.add_row("host memory for checkpoints", f"{format_bytes(pool.size)} ({pool.size:,} B)")
    if copies:
        table.add_row("copies in host memory, at most", format_bytes(copies))
    return table


def _names(created: Sequence[Communicator]) -> str:
    counts = Counter(communicator.name for communicator in created)
    named = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return f"{len(created)}: {', '.join(named)}" if created else "0"


def _first(items: Sequence[object], most: int) -> str:
    text = " ".join(map(str, items[:most]))
    return f"{text} ..." if len(items) > most else text
