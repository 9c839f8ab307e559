"""Write the HTML page of `frontier-llm plan --html FILE`.

The page compares the best layouts and lists the reasons for which other layouts were refused.
"""

from collections.abc import Iterator, Mapping

from frontier_llm.planner import pictures
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.run_cost import run_cost
from frontier_llm.planner.search import Found
from frontier_llm.telemetry import html_page as page
from frontier_llm.telemetry.html_page import UNKNOWN, Tile
from frontier_llm.units import GIB, counted, format_bytes, format_count, format_seconds


def make_page(title: str, found: Found, subtitle: str) -> str:
    """Return a self-contained HTML document.

    Args:
        title: heading that names the model and the cluster.
        found: the result of a search, with at least one layout.
        subtitle: line under the heading that describes the search.
    """
    best = found.best[0]
    badge = ("bad", "does not fit") if best.refused else ("good", "fits")
    return page.page(
        title=title,
        badge=badge,
        subtitle=subtitle,
        body=[
            page.tiles(_tiles(best)),
            *_comparison(found),
            *_cost(found),
            page.section("Seconds of a step, by part", pictures.breakdown(found.best)),
            *_timeline(best),
            page.section(
                "Memory, by category", _memory(best), "Layout 1: GiB on a rank of each stage."
            ),
            *_refused(found.refused),
        ],
    )


def _tiles(best: Estimate) -> Iterator[Tile]:
    yield Tile("Layout", f"{best.candidate.grid.size}", "ranks", best.candidate.description)
    yield Tile("Step", format_seconds(best.time.seconds), note=f"{best.time.seconds:.3f} s")
    yield Tile("Throughput", format_count(best.tokens_per_second), "tokens/s")
    mfu, hfu = best.mfu, best.hfu
    share = UNKNOWN if mfu is None else f"{mfu:.1%}"
    note = "" if hfu is None else f"HFU {hfu:.1%} with recomputation"
    yield Tile("MFU", share, "of the peak", note)
    peak = f"stage {best.peak.stage}, most for {best.peak.largest}"
    yield Tile("Peak memory", format_bytes(best.peak.total), note=peak)
    yield Tile("Bubble", f"{best.time.bubble_fraction:.1%}", "of the step")


def _comparison(found: Found) -> Iterator[str]:
    if len(found.best) < 2:
        return
    caption = (
        "Blue circles are the rows of the table. The line is the Pareto front: no legal layout is "
        "better in both memory and speed. Point at a circle or dot to see its layout."
    )
    head = ["Layout", "Step", "Tokens/s", "MFU", "Peak memory", "Bubble"]
    rows = [
        [
            f"{number}. {estimate.candidate.description}",
            format_seconds(estimate.time.seconds),
            format_count(estimate.tokens_per_second),
            UNKNOWN if estimate.mfu is None else f"{estimate.mfu:.1%}",
            format_bytes(estimate.peak.total),
            f"{estimate.time.bubble_fraction:.1%}",
        ]
        for number, estimate in enumerate(found.best, start=1)
    ]
    body = pictures.pareto(found.best, found.front) + page.table(head, rows)
    yield page.section("Memory and speed", body, caption)


def _cost(found: Found) -> Iterator[str]:
    tokens = found.best[0].candidate.config.planner.tokens
    if tokens is None:
        return
    head = ["Layout", "Days", "Node-hours", "Energy", "Waiting for checkpoints", "Failures",
            "Lost to failures"]  # fmt: skip
    rows = []
    for number, layout in enumerate(found.best, start=1):
        cost = run_cost(layout, tokens)
        rows.append(
            [
                str(number),
                f"{cost.days:.1f}",
                format_count(cost.node_hours),
                UNKNOWN if cost.megawatt_hours is None else f"{cost.megawatt_hours:,.1f} MWh",
                f"{cost.checkpoint_share:.2%}",
                UNKNOWN if cost.interruptions is None else f"{cost.interruptions:.3g}",
                UNKNOWN if cost.lost_days is None else f"{cost.lost_days:.2g} days",
            ]
        )
    caption = (
        f"A run of {format_count(tokens)} tokens. A failure loses half the time between two "
        "checkpoints on average. The time of restarts is not included."
    )
    yield page.section("Cost of a run", page.table(head, rows), caption)


def _timeline(best: Estimate) -> Iterator[str]:
    if best.candidate.grid.pipeline > 1:
        caption = "Layout 1: the first micro-batches of a step. Dark = forward, light = backward."
        yield page.section("The pipeline", pictures.pipeline(best), caption)


def _memory(best: Estimate) -> str:
    names = list(best.memory[0].by_category)
    rows = [
        [
            f"stage {memory.stage}",
            *(f"{memory.by_category[name] / GIB:.2f}" for name in names),
            f"{memory.total / GIB:.2f}",
        ]
        for memory in best.memory
    ]
    return page.table(["Stage", *names, "all"], rows)


def _refused(refused: Mapping[str, int]) -> Iterator[str]:
    if refused:
        ordered = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
        rows = [[reason, str(count)] for reason, count in ordered]
        caption = (
            f"{counted(sum(refused.values()), 'cut')} of the model cannot run. A cut is a choice "
            "of tensor and pipeline sizes, chunks, micro-batch and recomputation."
        )
        yield page.section("Refused layouts", page.table(["Reason", "Cuts"], rows), caption)
