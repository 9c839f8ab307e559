"""Draw the learning-rate schedules: docs/images/learning_rates.svg.

`python -m docs.generate.rates_chart` reports whether the chart is out of date, and `--write` draws
it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from docs.generate.chart_style import (
    FOURTH,
    GRID,
    NEUTRAL,
    OURS,
    TEXT,
    THEIRS,
    digest_comment,
    side_by_side,
    svg,
)
from docs.generate.results import ROOT
from frontier_llm.cli.options import run_command, tool_parser
from frontier_llm.trainer import learning_rate
from frontier_llm.trainer.learning_rate import LearningRate

FILE = ROOT / "docs" / "images" / "learning_rates.svg"
STEPS, WARMUP, COOLDOWN = 1000, 100, 200
PEAK, MINIMUM = 1.0, 0.1
SCHEDULES = {
    "cosine": (LearningRate(PEAK, MINIMUM, WARMUP, STEPS), OURS),
    "linear": (LearningRate(PEAK, MINIMUM, WARMUP, STEPS, "linear"), THEIRS),
    "constant": (LearningRate(PEAK, MINIMUM, WARMUP, STEPS, "constant"), NEUTRAL),
    "wsd, 1-sqrt": (LearningRate(PEAK, MINIMUM, WARMUP, STEPS, "wsd", COOLDOWN), FOURTH),
    "wsd, linear": (LearningRate(PEAK, MINIMUM, WARMUP, STEPS, "wsd", COOLDOWN, "linear"), FOURTH),
    "inverse_sqrt": (
        LearningRate(PEAK, MINIMUM, WARMUP, STEPS, "inverse_sqrt", timescale_steps=WARMUP),
        "#8250df",
    ),
}
"""The schedule and the colour of each line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chart with `--write`, or report whether it is out of date; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="draw and write it")
    if parser.parse_args(arguments).write:
        FILE.write_text(svg(draw, _digest()))
        return 0
    if FILE.exists() and _digest() in FILE.read_text():
        return 0
    message = "learning_rates.svg is not current: python -m docs.generate.rates_chart --write"
    print(message, file=sys.stderr)
    return 1


def draw() -> Figure:
    """Draw the rates of a run of 1,000 steps, relative to the peak."""
    figure = Figure((8, 3))
    (axes,) = side_by_side(figure, 1)
    steps = range(1, STEPS + 1)
    for name, (rate, colour) in SCHEDULES.items():
        style = "--" if name == "wsd, linear" else "-"
        axes.plot(steps, [rate(step) for step in steps], style, color=colour, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("rate / peak")
    axes.set_ylim(0, 1.05)
    axes.grid(color=GRID)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, labelcolor=TEXT)
    return figure


def _digest() -> str:
    return digest_comment(__file__, [Path(learning_rate.__file__).read_bytes()])


if __name__ == "__main__":
    sys.exit(run_command(main))
