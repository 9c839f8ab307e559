"""Draw the actions of a pipeline's stages over time as SVG.

The planner draws a simulated step, and the report of a run draws a measured one below it.
"""

from collections.abc import Iterator, Sequence
from html import escape

from frontier_llm.geometry.pipeline_schedule import Event, Kind

WIDTH = 1080
"""Width of the picture in pixels."""
DRAWN_STAGES = 16
"""Number of stages in a picture, at most."""
_COLOURS: dict[Kind, tuple[str, str]] = {
    "forward": ("#2563eb", "forward"),
    "backward": ("#60a5fa", "backward"),
    "input_gradients": ("#93c5fd", "input gradients"),
    "weight_gradients": ("#86efac", "weight gradients"),
}
"""Colour and name of each kind of action."""
_LABELS, _TOP, _ROW = 80, 34, 26
"""Width of the labels, top of the first row, and height of a row, in pixels."""


def draw(events: Sequence[Event], label: str = "pipeline", last: float | None = None) -> str:
    """Draw actions as boxes with the number of their micro-batch, one row per stage.

    Args:
        events: at least one action. Of many stages, equally spaced ones are drawn.
        label: label for screen readers.
        last: seconds at the right end of the time axis; None = the end of the last action.
    """
    stages = sorted({event.stage for event in events})
    shown = stages[:: max(1, -(-len(stages) // DRAWN_STAGES))]
    rows = {stage: _TOP + index * _ROW for index, stage in enumerate(shown)}
    last = max(event.end for event in events) if last is None else last
    scale = (WIDTH - _LABELS - 10) / last if last else 0.0
    body = [
        *_legend({event.action.kind for event in events}, last),
        *(_text(0, y + 14, f"stage {stage}") for stage, y in rows.items()),
        *(_box(event, rows[event.stage], scale) for event in events if event.stage in rows),
    ]
    height = _TOP + len(shown) * _ROW + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def _legend(kinds: set[Kind], last: float) -> Iterator[str]:
    """Yield the colours of the kinds that are drawn, and the length of the time axis."""
    x = 0.0
    for kind, (colour, name) in _COLOURS.items():
        if kind in kinds:
            yield f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>'
            yield _text(x + 16, 14, name)
            x += 40 + 6.2 * len(name)
    yield _text(x, 14, f"seconds 0 to {last:.3g}; numbers are micro-batches")


def _box(event: Event, y: int, scale: float) -> str:
    """Draw one action in the row that starts at `y`; `scale` is in pixels per second."""
    kind, virtual_stage, micro_batch = event.action
    x, width = _LABELS + event.start * scale, (event.end - event.start) * scale
    colour, name = _COLOURS[kind]
    title = f"{name}: micro-batch {micro_batch}, virtual stage {virtual_stage}"
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="20" fill="{colour}" '
        f'stroke="white" stroke-width="0.5"><title>{title}</title></rect>'
    )
    if width < 12:  # too narrow for the number of the micro-batch
        return box
    ink = "white" if kind == "forward" else "#0f172a"
    return box + (
        f'<text x="{x + width / 2:.1f}" y="{y + 14}" font-size="11" fill="{ink}" '
        f'text-anchor="middle">{micro_batch}</text>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="#334155">{escape(words)}</text>'
