"""Draw the charts of the planner's HTML page as SVG.

`plan_page` places them in the page that `frontier-llm plan --html FILE` writes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.timeline import simulate
from frontier_llm.telemetry.pipeline_picture import WIDTH, Event, draw
from frontier_llm.units import GIB, format_count, format_seconds

COLOURS = {
    "compute": "#2563eb",
    "tensor": "#0891b2",
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


def pareto(estimates: Sequence[Estimate], front: Sequence[Estimate]) -> str:
    """Draw layouts by peak memory (horizontal axis) and tokens per second (vertical axis).

    Args:
        estimates: the best layouts, drawn as numbered circles.
        front: the Pareto front, ascending by memory, drawn as dots on a line.
    """
    drawn = (*estimates, *front)
    height, bottom, left, right = 340, 290, 80, WIDTH - 40
    most_memory = 1.08 * max(layout.peak.total / GIB for layout in drawn)
    most_speed = 1.08 * max(layout.tokens_per_second for layout in drawn)

    def position(layout: Estimate) -> tuple[float, float]:
        x = left + layout.peak.total / GIB / most_memory * (right - left)
        return x, bottom - layout.tokens_per_second / most_speed * (bottom - 20)

    body = [_axis(left, bottom, right)]
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


def breakdown(estimates: Sequence[Estimate]) -> str:
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


def pipeline(estimate: Estimate) -> str:
    """Draw the first actions of a step, one row per stage."""
    return draw(_events(estimate))


def _events(estimate: Estimate) -> list[Event]:
    """Simulate a step with few micro-batches."""
    candidate, time = estimate.candidate, estimate.time
    drawn = max(DRAWN_MICRO_BATCHES, candidate.grid.pipeline)
    layout = candidate.layout
    short = replace(layout, micro_batches=min(layout.micro_batches, drawn))
    return simulate(short.schedule, candidate.stages.of_stages(time.actions), time.send)


def _legend() -> Iterator[str]:
    x = 0.0
    for name, colour in COLOURS.items():
        yield f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 16, 14, name.replace("_", " "))
        x += 40 + 6.2 * len(name)


def _axis(left: float, bottom: float, right: float) -> str:
    return (
        f'<path d="M{left} 20 V{bottom} H{right}" fill="none" stroke="#94a3b8" stroke-width="1"/>'
    )


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
