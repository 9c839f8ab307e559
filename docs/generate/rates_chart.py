"""The chart of the learning-rate schedules, docs/images/learning_rates.svg."""

from pathlib import Path

from matplotlib.figure import Figure

from docs.generate.drawing import FOURTH, IMAGES, NEUTRAL, OURS, THEIRS, chart, panels
from frontier_llm.trainer.learning_rate import LearningRate

FILE = IMAGES / "learning_rates.svg"
STEPS, WARMUP, COOLDOWN = 1000, 100, 200
DRAWN = range(1, STEPS + 1)
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


def images() -> dict[Path, str]:
    """Return the chart."""
    rates = {name: [rate(step) for step in DRAWN] for name, (rate, _) in SCHEDULES.items()}
    return {FILE: chart(FILE, __file__, repr(rates).encode(), draw)}


def draw() -> Figure:
    """Draw the rates of a run of 1,000 steps, relative to the peak."""
    figure, (axes,) = panels((8, 3), "")
    for name, (rate, colour) in SCHEDULES.items():
        style = "--" if name == "wsd, linear" else "-"
        axes.plot(DRAWN, [rate(step) for step in DRAWN], style, color=colour, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("rate / peak")
    axes.set_ylim(0, 1.05)
    axes.grid()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
