"""What tools/plan.py prints."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from frontier_llm.config.run import RunConfig
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.scaling import Point
from frontier_llm.planner.search import Found
from frontier_llm.units import GIB, format_bytes, format_count
from tools.plain_table import plain_table

MOST_STAGES = 8
"""Stages whose memory is printed; --json has all."""


def layouts_table(found: Found) -> Table:
    """Return the layouts, the best first."""
    links = list(dict.fromkeys(link for e in found.best for link in e.time.exposed if link))
    columns = ["", "TP", "PPxC", "DP", "micro", "P/G/OS", "recompute", "wire", "step s"]
    columns += ["tokens/s", "MFU", "HFU", "peak GiB", "bubble"]
    columns += [f"{link} s" for link in links] + ["ckpt s"]
    best = found.best[0]
    title = (
        f"{best.candidate.config.model.name} on {best.candidate.grid.size} ranks of "
        f"{best.candidate.config.cluster.name}, {best.candidate.config.data.global_batch} samples "
        f"a step: {found.looked_at} legal cuts, {found.judged} layouts timed"
    )
    table = plain_table(title, columns)
    for number, judged in enumerate(found.best, start=1):
        table.add_row(str(number), *_row(judged, links))
    table.caption = "seconds by link: communication that is not hidden behind computation"
    return table


def details(judged: Estimate) -> Iterator[Table]:
    """Yield where the seconds and the memory of a layout go."""
    table = plain_table("Layout 1: the step, seconds of the slowest stage", ["part", "s", "share"])
    for name, seconds in judged.time.parts.items():
        share = f"{seconds / judged.time.seconds:.1%}"
        table.add_row(name.replace("_", " "), f"{seconds:.4g}", share)
    yield table
    names = [
        n for n in judged.memory[0].by_category if any(m.by_category[n] for m in judged.memory)
    ]
    stages = judged.memory[:: max(1, -(-len(judged.memory) // MOST_STAGES))]
    columns = ["stage", *names, "all"]
    table = plain_table("Layout 1: peak memory of a rank, GiB", columns)
    for memory in stages:
        sizes = [memory.by_category[name] / GIB for name in names]
        table.add_row(str(memory.stage), *map(_short, sizes), _short(memory.total / GIB))
    if judged.peak.host_bytes:
        table.caption = f"and {format_bytes(judged.peak.host_bytes)} of main memory a rank"
    yield table


def refusals_table(found: Found) -> Table:
    """Return what cannot run, by reason."""
    table = plain_table("Refused", ["reason", "cuts", "for example"])
    for reason, count in sorted(found.refused.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(reason, str(count), found.examples.get(reason, ""))
    return table


def scaling_table(config: RunConfig, points: Sequence[Point]) -> Table:
    """Return the scaling curves."""
    title = (
        f"{config.model.name} on {config.cluster.name}: strong scaling with "
        f"{config.data.global_batch} samples a step, weak scaling from as many"
    )
    columns = ["nodes", "ranks", "strong: tokens/s", "efficiency", "MFU", "layout"]
    table = plain_table(title, [*columns, "weak: tokens/s", "efficiency", "MFU", "layout"])
    for point in points:
        size = point.strong or point.weak
        ranks = str(size.candidate.grid.size) if size else ""
        strong = _point(point.strong, point.strong_efficiency)
        table.add_row(str(point.nodes), ranks, *strong, *_point(point.weak, point.weak_efficiency))
    return table


def _point(judged: Estimate | None, efficiency: float | None) -> list[str]:
    if judged is None or efficiency is None:
        return ["none fits", "", "", ""]
    return [
        format_count(judged.tokens_per_second),
        f"{efficiency:.0%}",
        _percent(judged.mfu),
        judged.candidate.description,
    ]


def _row(judged: Estimate, links: Sequence[str]) -> list[str]:
    candidate, time = judged.candidate, judged.time
    config, factors = candidate.config, candidate.factors
    collectives = config.collectives
    return [
        str(candidate.grid.tensor),
        f"{candidate.grid.pipeline}x{config.parallel.chunks}",
        str(candidate.grid.data),
        str(config.data.micro_batch),
        f"{factors.params}/{factors.grads}/{factors.optimizer}",
        config.recompute,
        collectives.name if collectives.name != "plain" else collectives.grads_format,
        f"{time.seconds:.3f}",
        format_count(judged.tokens_per_second),
        _percent(judged.mfu),
        _percent(judged.hfu),
        f"{judged.peak.total / GIB:.1f}",
        f"{time.bubble_fraction:.1%}",
        *(f"{time.exposed.get(link, 0.0):.3f}" for link in links),
        f"{time.parts['checkpoint']:.3f}",
    ]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _short(gib: float) -> str:
    return f"{gib:.2f}" if gib >= 0.005 else f"{gib:.0e}" if gib else "0"
