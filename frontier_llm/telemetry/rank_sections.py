"""The parts of the report that look at single ranks: how the model is cut, what each one holds."""

import math
from collections.abc import Iterator, Sequence

from frontier_llm.telemetry import figures, page
from frontier_llm.telemetry.page import counted
from frontier_llm.telemetry.rank_map import COLOURS, LARGEST, grid_of, layer_words, rank_map
from frontier_llm.telemetry.summary import Layout, RankSummary, RunSummary
from frontier_llm.units import format_bytes

BOUNDED = ("gathered", "messages")
"""Categories of which the prediction is a bound."""


def layout_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on how the model is cut, where that is known."""
    layout = summary.layout
    if layout is None:
        return
    words = (
        f"{counted(layout.ranks, 'rank')} = {layout.tensor} tensor x {layout.pipeline} pipeline x "
        f"{layout.data} data; {counted(layout.chunks, 'chunk')} a stage; sequence parallel "
        f"{'on' if layout.sequence else 'off'}; {counted(layout.ranks_per_node, 'rank')} a node. "
    )
    if layout.ranks > LARGEST:
        words += f"Above {LARGEST} ranks this shows stages instead of single ranks."
        yield page.section("How the model is cut", _stage_table(layout, summary.ranks), words)
        return
    words += "Cells of one colour together hold one copy of the model; dark lines bound a node."
    if layout.data > COLOURS:
        words += f" (Colours repeat after {COLOURS} copies.)"
    yield page.section("How the model is cut", rank_map(layout, summary.ranks), words)


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
    return page.table(["Stage", "Layers", "Ranks", "Nodes", "Largest peak memory"], rows)


def _by_stage(layout: Layout, ranks: Sequence[RankSummary]) -> dict[int, list[RankSummary]]:
    return {
        stage: [rank for rank in ranks if rank.pipeline == stage]
        for stage in range(layout.pipeline)
    }


def memory_section(summary: RunSummary) -> Iterator[str]:
    """Yield the section on what each rank holds, where that is known."""
    ranks = summary.ranks
    if not any(rank.memory_bytes or rank.peak_bytes for rank in ranks):
        return
    labels, groups, axis = [str(rank.rank) for rank in ranks], [[rank] for rank in ranks], "rank"
    words = "One bar a rank."
    if len(ranks) > LARGEST and summary.layout is not None:
        stages = _by_stage(summary.layout, ranks)
        labels, groups, axis = [str(stage) for stage in stages], list(stages.values()), "stage"
        words = f"Above {LARGEST} ranks: one bar a stage, the most that any of its ranks holds."
    names = list(dict.fromkeys(name for rank in ranks for name in rank.memory_bytes))
    by_category = {
        name: [float(max((r.memory_bytes.get(name, 0) for r in g), default=0)) for g in groups]
        for name in names
    }
    peaks = [float(max((r.peak_bytes or math.nan for r in g), default=math.nan)) for g in groups]
    drawing = figures.memory_figure(labels, by_category, peaks, axis)
    yield page.section("Where memory goes", drawing, f"{words} {_prediction_words(ranks)}".strip())


def _prediction_words(ranks: Sequence[RankSummary]) -> str:
    """Compare what is held with what was predicted; what is there for a while is only bounded."""
    if not all(rank.predicted_bytes for rank in ranks):
        return ""
    for rank in ranks:
        for name, predicted in rank.predicted_bytes.items():
            held = rank.memory_bytes.get(name, 0)
            if held > predicted or (held < predicted and name not in BOUNDED):
                return (
                    f"Rank {rank.rank} holds {format_bytes(held)} of {name}, where "
                    f"{format_bytes(predicted)} was predicted."
                )
    return (
        "Every category is as predicted, to the byte (gathered parameters and messages: within "
        "their bounds)."
    )
