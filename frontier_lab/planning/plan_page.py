"""Write the HTML page of `frontier-llm plan --html FILE`, which compares the best layouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape

from frontier_lab.planning.run_cost import run_cost
from frontier_lab.planning.search import Found
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.timeline import simulate
from frontier_llm.telemetry import html_page as page
from frontier_llm.telemetry.html_page import UNKNOWN, Tile
from frontier_llm.telemetry.pipeline_picture import WIDTH, draw
from frontier_llm.units import GIB, counted, format_bytes, format_count, format_seconds

COLOURS = {
    "compute": "#2563eb",
    "tensor": "#0891b2",
    "context": "#0d9488",
    "host": "#a16207",
    "exchange": "#16a34a",
    "bubble": "#cbd5e1",
    "gather_params": "#ca8a04",
    "reduce_grads": "#ea580c",
    "reduce_states": "#be185d",
    "refresh_params": "#7c3aed",
    "update": "#64748b",
    "checkpoint": "#0f172a",
}
"""Colours of the parts of a step. `exchange` is sending between stages, `reduce_states` the sum of
gradients over replicas, and `refresh_params` the gathering of updated parameters."""
DRAWN_MICRO_BATCHES = 24
"""Number of micro-batches in the drawing of a pipeline, or that of the stages if it is larger."""
_LEFT, _TOP, _ROW = 400, 34, 26
"""Width of the labels, top of the first row, and height of a row, in pixels."""


def make_page(title: str, found: Found, subtitle: str) -> str:
    """Return a self-contained HTML document about the result of a search, at least one layout."""
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
            page.section("Seconds of a step, by part", _breakdown(found.best)),
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
    body = _pareto(found.best, found.front) + page.table(head, rows)
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
    """Draw a step with few micro-batches."""
    candidate = best.candidate
    if candidate.grid.pipeline > 1:
        most = max(DRAWN_MICRO_BATCHES, candidate.grid.pipeline)
        micro_batches = min(candidate.layout.micro_batches, most)
        short = replace(candidate.layout, micro_batches=micro_batches)
        seconds = candidate.stages.of_stages(best.time.actions)
        caption = "Layout 1: the first micro-batches of a step. Dark = forward, light = backward."
        yield page.section(
            "The pipeline", draw(simulate(short.schedule, seconds, best.time.send)), caption
        )


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


def _pareto(estimates: Sequence[Estimate], front: Sequence[Estimate]) -> str:
    """Draw layouts by peak memory (horizontal axis) and tokens per second (vertical axis).

    `estimates` are drawn as numbered circles, the Pareto front as dots on a line.
    """
    drawn = (*estimates, *front)
    height, bottom, left, right = 340, 290, 80, WIDTH - 40
    most_memory = 1.08 * max(layout.peak.total / GIB for layout in drawn)
    most_speed = 1.08 * max(layout.tokens_per_second for layout in drawn)

    def position(layout: Estimate) -> tuple[float, float]:
        x = left + layout.peak.total / GIB / most_memory * (right - left)
        return x, bottom - layout.tokens_per_second / most_speed * (bottom - 20)

    axes = (
        f'<path d="M{left} 20 V{bottom} H{right}" fill="none" stroke="#94a3b8" stroke-width="1"/>'
    )
    body = [axes]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - 20)
        x = left + share * (right - left)
        body.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#e2e8f0"/>')
        body.append(_text(left - 8, y + 4, format_count(share * most_speed), "end"))
        body.append(_text(x, bottom + 18, f"{share * most_memory:.1f} GiB", "middle"))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(position, front))
    body.append(f'<polyline points="{line}" fill="none" stroke="#94a3b8"/>')
    body += [
        _dot(*position(layout), 3, "#64748b", layout.candidate.description) for layout in front
    ]
    labels: list[tuple[float, float, str]] = []
    for number, layout in enumerate(estimates, start=1):
        x, y = position(layout)
        _add_label(labels, x, y, str(number))
        body.append(_dot(x, y, 6, COLOURS["compute"], f"{number}: {layout.candidate.description}"))
    body += [_text(x, y - 10, text, "middle") for x, y, text in labels]
    body.append(_text(left, height - 8, "peak memory of the fullest rank"))
    body.append(_text(left, 14, "tokens per second"))
    return _svg(height, body)


def _add_label(labels: list[tuple[float, float, str]], x: float, y: float, text: str) -> None:
    """Add a label at (x, y), or join it to an earlier one that it would overlap."""
    for index, (x_before, y_before, before) in enumerate(labels):
        # a character is about 7 x 14 pixels
        if abs(x - x_before) < 3.5 * len(before + text) + 4 and abs(y - y_before) < 14:
            labels[index] = (x_before, y_before, f"{before}, {text}")
            return
    labels.append((x, y, text))


def _dot(x: float, y: float, radius: float, colour: str, title: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _breakdown(estimates: Sequence[Estimate]) -> str:
    """Draw one bar per layout, which divides the seconds of its step by kind of work."""
    slowest = max(estimate.time.seconds for estimate in estimates)
    bar_width = WIDTH - _LEFT - 90
    body = list(_legend())
    for row, estimate in enumerate(estimates):
        y, x = _TOP + row * _ROW, float(_LEFT)
        body.append(_text(0, y + 14, f"{row + 1}. {estimate.candidate.description}"))
        for name, colour in COLOURS.items():
            seconds = estimate.time.parts.get(name, 0.0)
            width = seconds / slowest * bar_width
            if width > 0:
                title = f"{name.replace('_', ' ')}: {format_seconds(seconds)}"
                body.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="18" fill="{colour}">'
                    f"<title>{title}</title></rect>"
                )
            x += width
        body.append(_text(x + 6, y + 14, format_seconds(estimate.time.seconds)))
    return _svg(_TOP + len(estimates) * _ROW + 6, body)


def _legend() -> Iterator[str]:
    x = 0.0
    for name, colour in COLOURS.items():
        yield f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 16, 14, name.replace("_", " "))
        x += 40 + 6.2 * len(name)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="#334155" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _svg(height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">' + "".join(body) + "</svg>"
    )
