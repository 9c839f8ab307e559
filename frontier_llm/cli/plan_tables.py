"""Build the tables that frontier-llm plan prints; docs/planner.md explains their columns."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from frontier_llm.cli.plain_table import plain_table
from frontier_llm.config.run import RunConfig
from frontier_llm.planner.estimate import Estimate, budget_bytes, run_cost
from frontier_llm.planner.memory import StageMemory
from frontier_llm.planner.search import Found, Point
from frontier_llm.units import GIB, counted, format_bytes, format_count, format_figure

MOST_STAGES = 8
"""Maximum number of stages whose memory is printed; --json writes all stages."""
NEAR = 0.03
"""Layouts whose step times differ less are not certain to be in the order of the table."""
EXAMPLE_WIDTH = 72
"""Characters per line of the column with examples of refused layouts."""


def layouts_table(found: Found) -> Table:
    """Return the table of the best layouts, one row per layout.

    Some columns are left out where they say nothing: values that all layouts share, which the
    caption names, seconds that are 0 for all layouts, and an HFU that equals the MFU.
    """
    rows = [_row(layout) for layout in found.best]
    best = found.best[0]
    zero = [
        name for name in rows[0] if name.endswith(" s") and not any(float(r[name]) for r in rows)
    ]
    equal_columns = (name for name in rows[0] if len({row[name] for row in rows}) == 1)
    same = [name for name in equal_columns if len(rows) > 1 and name not in (*zero, "HFU")]
    equal = ["HFU"] if all(row["HFU"] == row["MFU"] for row in rows) else []
    columns = [name for name in rows[0] if name not in (*same, *zero, *equal)]
    title = (
        f"{best.candidate.config.model.name} on {counted(best.candidate.grid.size, 'rank')} of "
        f"{best.candidate.config.cluster.name}, {best.candidate.config.data.global_batch} samples "
        f"per step: {counted(found.examined, 'legal combination')}, {found.timed} with a predicted "
        "time"
    )
    table = plain_table(title, ["", *columns])
    for number, row in enumerate(rows, start=1):
        table.add_row(str(number), *(row[name] for name in columns))
    table.caption = (
        "PPxC: stages x chunks per stage; schedule: parallel.schedule+"
        "parallel.waiting_weights; P/G/OS: data ranks over which parameters, gradients and "
        "optimizer states are sharded; columns of links: seconds of communication that does not "
        "overlap with computation"
    )
    if same:
        shared = ", ".join(f"{name} {rows[0][name]}" for name in same)
        table.caption += f"; all layouts: {shared}"
    near = sum(layout.time.seconds <= best.time.seconds * (1 + NEAR) for layout in found.best)
    if near > 1 and best.candidate.config.planner.objective != "memory":
        table.caption += (
            f"; the first {near} differ by less than {NEAR:.0%}, so their order is not certain"
        )
    return table


def overrides(layout: Estimate) -> str:
    """Return the overrides that give a layout, apart from its sharding factors."""
    config = layout.candidate.config
    names = ("tensor", "pipeline", "chunks", "schedule", "waiting_weights", "sequence")
    chosen = config.parallel.model_dump(mode="json", include=set(names))
    words = [f"parallel.{name}={str(chosen[name]).lower()}" for name in names]
    return " ".join(
        [*words, f"data.micro_batch={config.data.micro_batch}", f"recompute={config.recompute}"]
    )


def details(layout: Estimate) -> Iterator[Table]:
    """Yield two tables of a layout: the parts of its step time, and of its peak memory."""
    title = "Layout 1: parts of the step time, for the slowest stage"
    table = plain_table(title, ["part", "seconds", "share"])
    for name, seconds in layout.time.parts.items():
        share = f"{seconds / layout.time.seconds:.1%}"
        table.add_row(name.replace("_", " "), f"{seconds:.3g}", share)
    yield table
    stages = _shown_stages(layout)
    columns = ["stage", *(str(memory.stage) for memory in stages)]
    device = layout.candidate.config.cluster.device.memory_gib
    usable = budget_bytes(layout.candidate) / GIB
    title = f"Layout 1: peak memory per rank, GiB of {device:.3g}"
    if usable < device:
        title += f", of which {usable:.3g} may be used"
    table = plain_table(title, columns)
    for name in layout.memory[0].by_category:
        if any(memory.by_category[name] for memory in stages):
            sizes = [memory.by_category[name] / GIB for memory in stages]
            table.add_row(name, *map(_short, sizes))
    table.add_row("total", *(_short(memory.total / GIB) for memory in stages))
    if layout.peak.host_bytes:
        table.caption = f"and {format_bytes(layout.peak.host_bytes)} of main memory per rank"
    yield table


def _shown_stages(layout: Estimate) -> list[StageMemory]:
    """Return the memory of at most MOST_STAGES stages: the first, fullest, last and some others."""
    stages, last = layout.memory, len(layout.memory) - 1
    count = min(MOST_STAGES, len(stages))
    spread = {round(place * last / max(1, count - 1)) for place in range(count)}
    if layout.peak.stage not in spread:
        spread.remove(min(spread - {0, last}, key=lambda stage: abs(stage - layout.peak.stage)))
    return [stages[stage] for stage in sorted({*spread, layout.peak.stage})]


def cost_table(found: Found, tokens: float) -> Table:
    """Return the table of what a run of `tokens` tokens costs with each layout."""
    columns = ["", "steps", "days", "node-hours", "MWh", "waiting for checkpoints", "failures",
               "days lost to failures"]  # fmt: skip
    table = plain_table(f"Cost of {format_count(tokens)} tokens", columns)
    for number, layout in enumerate(found.best, start=1):
        cost = run_cost(layout, tokens)
        table.add_row(
            str(number),
            f"{cost.steps:,}",
            f"{cost.days:.1f}",
            format_count(cost.node_hours),
            _known(cost.megawatt_hours),
            f"{cost.checkpoint_share:.2%}",
            _known(cost.interruptions),
            _known(cost.lost_days),
        )
    table.caption = (
        "a failure loses half the time between two checkpoints on average; the time of restarts "
        "is not included; unknown: set cluster.operation.node_watts or .node_hours_per_failure"
    )
    return table


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def refusals_table(found: Found) -> Table:
    """Return the table of refused layouts by reason."""
    table = plain_table("Refused layouts", ["reason", "count"])
    table.add_column("for example", max_width=EXAMPLE_WIDTH)
    for reason, count in sorted(found.refused.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(reason, str(count), found.examples.get(reason, ""))
    return table


def scaling_table(config: RunConfig, points: Sequence[Point]) -> Table:
    """Return the table of the scaling curves."""
    title = (
        f"{config.model.name} on {config.cluster.name}: strong scaling with "
        f"{config.data.global_batch} samples per step; weak scaling starts with the same number"
    )
    columns = ["scaling", "nodes", "ranks", "tokens/s", "efficiency", "MFU", "layout"]
    table = plain_table(title, columns)
    for point in points:
        found = point.strong or point.weak
        size = (str(point.nodes), str(found.candidate.grid.size) if found else "")
        table.add_row("strong", *size, *_point(point.strong, point.strong_efficiency))
        table.add_row("weak", *size, *_point(point.weak, point.weak_efficiency))
    return table


def _point(layout: Estimate | None, efficiency: float | None) -> list[str]:
    """Return the columns tokens/s, efficiency, MFU and layout of one number of nodes."""
    if layout is None or efficiency is None:
        return ["none fits", "", "", ""]
    return [
        format_count(layout.tokens_per_second, 3),
        f"{efficiency:.0%}",
        _percent(layout.mfu),
        layout.candidate.description,
    ]


def _row(layout: Estimate) -> dict[str, str]:
    """Return the columns of one layout by their titles, in their order."""
    candidate, time = layout.candidate, layout.time
    config, factors = candidate.config, candidate.factors
    collectives = config.collectives
    exposed = {
        f"{k.name} s": format_figure(time.exposed.get(k.name, 0.0)) for k in config.cluster.links
    }
    device = config.cluster.device.memory_gib
    return {
        "TP": str(candidate.grid.tensor),
        "PPxC": f"{candidate.grid.pipeline}x{config.parallel.chunks}",
        "schedule": candidate.schedule,
        "DP": str(candidate.grid.data),
        "micro": str(config.data.micro_batch),
        "P/G/OS": f"{factors.params}/{factors.grads}/{factors.optimizer}",
        "recompute": config.recompute,
        "wire": collectives.name if collectives.name != "plain" else collectives.grads_format,
        "step s": format_figure(time.seconds, 3),
        "tokens/s": format_count(layout.tokens_per_second, 3),
        "MFU": _percent(layout.mfu),
        "HFU": _percent(layout.hfu),
        f"peak of {device:.3g} GiB": format_figure(layout.peak.total / GIB, 3),
        "bubble": f"{time.bubble_fraction:.1%}",
        **exposed,
        "ckpt s": format_figure(time.parts["checkpoint"]),
    }


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"


def _short(gib: float) -> str:
    """Return a size with two decimals, or as a power of ten if that would be 0.00."""
    return f"{gib:.2f}" if gib >= 0.005 else f"{gib:.0e}" if gib else "0"
