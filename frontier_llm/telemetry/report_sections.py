"""Sections of the report: the layout of ranks, the memory of each rank, and plan against run."""

import math
from collections.abc import Iterator, Sequence

from frontier_llm.telemetry import figures, html_page
from frontier_llm.telemetry.html_page import UNKNOWN, counted
from frontier_llm.telemetry.rank_map import COLOURS, LARGEST, grid_of, layer_words, rank_map
from frontier_llm.telemetry.summary import Layout, PlanRow, RankSummary, RunSummary
from frontier_llm.units import format_bytes, format_seconds

BOUNDED = ("gathered", "messages")
"""Categories for which the prediction is an upper bound."""


def layout_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on the layout of ranks, if the layout is known."""
    layout = summary.layout
    if layout is None:
        return
    words = (
        f"{counted(layout.ranks, 'rank')} = {layout.tensor} tensor x {layout.pipeline} pipeline x "
        f"{layout.data} data; {counted(layout.chunks, 'chunk')} per stage; sequence parallel "
        f"{'on' if layout.sequence else 'off'}; {counted(layout.ranks_per_node, 'rank')} per node. "
    )
    if layout.ranks > LARGEST:
        words += f"Above {LARGEST} ranks, the table shows stages instead of single ranks."
        yield html_page.section("Layout of ranks", _stage_table(layout, summary.ranks), words)
        return
    words += "Cells of one colour together hold one copy of the model; dark lines are node borders."
    if layout.data > COLOURS:
        words += f" (Colours repeat after {COLOURS} copies.)"
    yield html_page.section("Layout of ranks", rank_map(layout, summary.ranks), words)


def _stage_table(layout: Layout, ranks: Sequence[RankSummary]) -> str:
    grid, per_stage = grid_of(layout), layout.tensor * layout.data
    rows = []
    for stage, members in _by_stage(layout, ranks).items():
        first, last = stage * per_stage, (stage + 1) * per_stage - 1
        peaks = [rank.peak_bytes for rank in members if rank.peak_bytes is not None]
        rows.append(
            [
                f"stage {stage}",
                layer_words(members[0].layers) if members else "",
                f"{first}-{last}",
                f"{grid.node(first)}-{grid.node(last)}",
                format_bytes(max(peaks)) if peaks else "unknown",
            ]
        )
    return html_page.table(["Stage", "Layers", "Ranks", "Nodes", "Largest peak memory"], rows)


def _by_stage(layout: Layout, ranks: Sequence[RankSummary]) -> dict[int, list[RankSummary]]:
    return {
        stage: [rank for rank in ranks if rank.pipeline == stage]
        for stage in range(layout.pipeline)
    }


def memory_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on the memory of each rank, if it is known."""
    ranks = summary.ranks
    if not any(rank.memory_bytes or rank.peak_bytes for rank in ranks):
        return
    labels, groups, axis = [str(rank.rank) for rank in ranks], [[rank] for rank in ranks], "rank"
    words = "One bar per rank."
    if len(ranks) > LARGEST and summary.layout is not None:
        stages = _by_stage(summary.layout, ranks)
        labels, groups, axis = [str(stage) for stage in stages], list(stages.values()), "stage"
        words = f"Above {LARGEST} ranks: one bar per stage, the maximum over its ranks."
    names = list(dict.fromkeys(name for rank in ranks for name in rank.memory_bytes))
    by_category = {
        name: [float(max((r.memory_bytes.get(name, 0) for r in g), default=0)) for g in groups]
        for name in names
    }
    peaks = [float(max((r.peak_bytes or math.nan for r in g), default=math.nan)) for g in groups]
    drawing = figures.memory_figure(labels, by_category, peaks, axis)
    yield html_page.section("Memory", drawing, f"{words} {_prediction_words(ranks)}".strip())


def _prediction_words(ranks: Sequence[RankSummary]) -> str:
    """State whether the bytes of every category are as predicted."""
    if not all(rank.predicted_bytes for rank in ranks):
        return ""
    for rank in ranks:
        for name, predicted in rank.predicted_bytes.items():
            held = rank.memory_bytes.get(name, 0)
            if held > predicted or (held < predicted and name not in BOUNDED):
                return (
                    f"Rank {rank.rank} holds {format_bytes(held)} of {name}; "
                    f"{format_bytes(predicted)} was predicted."
                )
    return (
        "Every category is as predicted, to the byte (gathered parameters and messages are within "
        "their upper bounds)."
    )


def plan_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section that compares the plan with the run, if the run has compared them."""
    if not summary.plan:
        return
    words = (
        "Measured on rank 0. Seconds are the shorter of the second and the third step. On a CPU, "
        "`process` is the memory of the whole process, the interpreter and its libraries included."
    )
    head = ["", "Planned", "Measured", "Difference"]
    yield html_page.section(
        "Plan and run", html_page.table(head, map(_plan_row, summary.plan)), words
    )


def _plan_row(row: PlanRow) -> list[str]:
    write = format_bytes if row.unit == "bytes" else format_seconds
    if row.predicted is None:
        return [row.name, UNKNOWN, write(row.measured), ""]
    if row.measured == row.predicted:
        difference = "none"
    else:
        difference = f"{row.measured / row.predicted - 1:+.0%}" if row.predicted else ""
    return [row.name, write(row.predicted), write(row.measured), difference]
