"""The planner's HTML page: the best layouts, compared, and why others were refused."""

from collections.abc import Iterator, Mapping

from frontier_llm.planner import pictures
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.search import Found
from frontier_llm.telemetry import html_page as page
from frontier_llm.telemetry.html_page import UNKNOWN, Tile, counted
from frontier_llm.units import GIB, format_bytes, format_count, format_seconds


def make_page(title: str, found: Found, words: str) -> str:
    """Return an HTML document that needs no other file.

    Args:
        title: the model and the cluster.
        found: the result of a search, with at least one layout.
        words: the subtitle: what was searched.
    """
    best = found.best[0]
    badge = ("bad", "does not fit") if best.refused else ("good", "fits")
    return page.page(
        title=title,
        badge=badge,
        subtitle=words,
        body=[
            page.tiles(_tiles(best)),
            *_comparison(found),
            page.section("Seconds of a step, by part", pictures.breakdown(found.best)),
            *_timeline(best),
            page.section("Memory, by category", _memory(best), "Layout 1, every stage, GiB."),
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
    words = (
        "Blue circles are the rows of the table. No legal layout is better in both than those on "
        "the line. Point at a circle or dot to see its layout."
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
    yield page.section("Memory and speed", body, words)


def _timeline(best: Estimate) -> Iterator[str]:
    if best.candidate.grid.pipeline > 1:
        words = "Layout 1: the first micro-batches of a step. Dark = forward, light = backward."
        yield page.section("The pipeline", pictures.pipeline(best), words)


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
        words = f"{counted(sum(refused.values()), 'cut')} of the model cannot run."
        yield page.section("Refused layouts", page.table(["Reason", "Cuts"], rows), words)
