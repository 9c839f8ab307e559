"""Draw the actions of a pipeline's stages over time as SVG.

The planner draws a simulated step, and the report of a run draws a measured one below it.
"""

from collections.abc import Sequence
from typing import Any

from frontier_llm.geometry.pipeline_schedule import Event, Kind
from frontier_llm.telemetry.html_page import element

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
        label: for screen readers.
        last: seconds at the right end of the time axis; None = the end of the last action.
    """
    stages = sorted({event.stage for event in events})
    shown = stages[:: max(1, -(-len(stages) // DRAWN_STAGES))]
    rows = {stage: _TOP + index * _ROW for index, stage in enumerate(shown)}
    last = max(event.end for event in events) if last is None else last
    scale = (WIDTH - _LABELS - 10) / last if last else 0.0
    legend, x = [], 0.0
    for kind in (kind for kind in _COLOURS if kind in {event.action.kind for event in events}):
        legend.append((x, *_COLOURS[kind]))
        x += 40 + 6.2 * len(_COLOURS[kind][1])
    axis = (x, f"seconds 0 to {last:.3g}; numbers are micro-batches")
    boxes = [_box(event, rows[event.stage], scale) for event in events if event.stage in rows]
    height = _TOP + len(shown) * _ROW + 6
    return element("pipeline", WIDTH, height, label, legend, axis, rows, boxes)


def _box(event: Event, y: int, scale: float) -> dict[str, Any]:
    """Return the box of an action in the row that starts at `y`; `scale` is pixels per second."""
    kind, virtual_stage, micro_batch = event.action
    colour, name = _COLOURS[kind]
    return {
        "x": _LABELS + event.start * scale,
        "y": y,
        "width": (event.end - event.start) * scale,
        "colour": colour,
        "ink": "white" if kind == "forward" else "#0f172a",
        "number": micro_batch,
        "title": f"{name}: micro-batch {micro_batch}, virtual stage {virtual_stage}",
    }
