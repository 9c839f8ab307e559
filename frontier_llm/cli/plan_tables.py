"""Build the tables that frontier-llm plan prints; docs/planner.md explains their columns."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from frontier_llm.cli.plain_table import plain_table
from frontier_llm.config.run import RunConfig
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.run_cost import run_cost
from frontier_llm.planner.scaling import Point
from frontier_llm.planner.search import Found
from frontier_llm.units import GIB, format_bytes, format_count

MOST_STAGES = 8
"""Maximum number of stages whose memory is printed; --json writes all stages."""


def layouts_table(found: Found) -> Table:
    """Return the table of the best layouts, one row per layout."""
    exposed = (link for layout in found.best for link in layout.time.exposed)
    links = list(dict.fromkeys(link for link in exposed if link))
    columns = ["", "TP", "PPxC", "schedule", "DP", "micro", "P/G/OS", "recompute", "wire", "step s"]
    columns += ["tokens/s", "MFU", "HFU", "peak GiB", "bubble"]
    columns += [f"{link} s" for link in links] + ["ckpt s"]
    best = found.best[0]
    title = (
        f"{best.candidate.config.model.name} on {best.candidate.grid.size} ranks of "
        f"{best.candidate.config.cluster.name}, {best.candidate.config.data.global_batch} samples "
        f"per step: {found.examined} legal combinations, {found.timed} with a predicted time"
    )
    table = plain_table(title, columns)
    for number, layout in enumerate(found.best, start=1):
        table.add_row(str(number), *_row(layout, links))
    table.caption = (
        "PPxC: stages x chunks per stage; schedule: parallel.schedule+"
        "parallel.waiting_weights; P/G/OS: data ranks over which parameters, gradients and "
        "optimizer states are sharded; columns of links: seconds of communication that does not "
        "overlap with computation"
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
        table.add_row(name.replace("_", " "), f"{seconds:.4g}", share)
    yield table
    names = [
        name
        for name in layout.memory[0].by_category
        if any(memory.by_category[name] for memory in layout.memory)
    ]
    stages = layout.memory[:: max(1, -(-len(layout.memory) // MOST_STAGES))]
    columns = ["stage", *names, "total"]
    table = plain_table("Layout 1: peak memory per rank, GiB", columns)
    for memory in stages:
        sizes = [memory.by_category[name] / GIB for name in names]
        table.add_row(str(memory.stage), *map(_short, sizes), _short(memory.total / GIB))
    if layout.peak.host_bytes:
        table.caption = f"and {format_bytes(layout.peak.host_bytes)} of main memory per rank"
    yield table


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
        "is not included; unknown: cluster.operation lacks the power or the failures of a node"
    )
    return table


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def refusals_table(found: Found) -> Table:
    """Return the table of refused layouts by reason."""
    table = plain_table("Refused layouts", ["reason", "count", "for example"])
    for reason, count in sorted(found.refused.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(reason, str(count), found.examples.get(reason, ""))
    return table


def scaling_table(config: RunConfig, points: Sequence[Point]) -> Table:
    """Return the table of the scaling curves."""
    title = (
        f"{config.model.name} on {config.cluster.name}: strong scaling with "
        f"{config.data.global_batch} samples per step; weak scaling starts with the same number"
    )
    columns = ["nodes", "ranks", "strong: tokens/s", "efficiency", "MFU", "layout"]
    table = plain_table(title, [*columns, "weak: tokens/s", "efficiency", "MFU", "layout"])
    for point in points:
        found = point.strong or point.weak
        ranks = str(found.candidate.grid.size) if found else ""
        strong = _point(point.strong, point.strong_efficiency)
        table.add_row(str(point.nodes), ranks, *strong, *_point(point.weak, point.weak_efficiency))
    return table


def _point(layout: Estimate | None, efficiency: float | None) -> list[str]:
    """Return the columns tokens/s, efficiency, MFU and layout of one number of nodes."""
    if layout is None or efficiency is None:
        return ["none fits", "", "", ""]
    return [
        format_count(layout.tokens_per_second),
        f"{efficiency:.0%}",
        _percent(layout.mfu),
        layout.candidate.description,
    ]


def _row(layout: Estimate, links: Sequence[str]) -> list[str]:
    """Return the columns of one layout in the order of `layouts_table`, without the number."""
    candidate, time = layout.candidate, layout.time
    config, factors = candidate.config, candidate.factors
    collectives = config.collectives
    return [
        str(candidate.grid.tensor),
        f"{candidate.grid.pipeline}x{config.parallel.chunks}",
        candidate.schedule,
        str(candidate.grid.data),
        str(config.data.micro_batch),
        f"{factors.params}/{factors.grads}/{factors.optimizer}",
        config.recompute,
        collectives.name if collectives.name != "plain" else collectives.grads_format,
        f"{time.seconds:.3f}",
        format_count(layout.tokens_per_second),
        _percent(layout.mfu),
        _percent(layout.hfu),
        f"{layout.peak.total / GIB:.1f}",
        f"{time.bubble_fraction:.1%}",
        *(f"{time.exposed.get(link, 0.0):.3f}" for link in links),
        f"{time.parts['checkpoint']:.3f}",
    ]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _short(gib: float) -> str:
    """Return a size with two decimals, or as a power of ten if that would be 0.00."""
    return f"{gib:.2f}" if gib >= 0.005 else f"{gib:.0e}" if gib else "0"
