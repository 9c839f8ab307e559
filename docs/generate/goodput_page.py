"""The table of effective training time in docs/reliability.md, and its chart."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.generate.blocks import headed
from docs.generate.drawing import IMAGES, chart
from frontier_lab.commands.goodput import DEFAULTS, NODES, Outcome, compare, draw, recoveries_of
from frontier_lab.planning.effective_time import RATES

CHART = IMAGES / "goodput.svg"
VALUES = {name: default.value for name, default in DEFAULTS.items()}
HALF_AN_HOUR = 1800.0


def images() -> dict[Path, str]:
    """Return the chart."""
    found = outcomes()
    data = repr(found).encode()
    return {CHART: chart(CHART, __file__, data, lambda: draw(found, VALUES["step"]))}


@cache
def outcomes(interval: float | None = None, **changed: float) -> list[Outcome]:
    """Simulate the defaults of the command at Llama 3's rate of failures, with some changes.

    `interval` are the seconds between checkpoints; None = the best of each way to recover.
    """
    ways = recoveries_of({**VALUES, **changed})
    return compare(ways, NODES, RATES["llama3"], VALUES["step"], interval=interval)


@headed(
    "nodes", "failure every", "restart, 30-minute checkpoints", "restart", "node-local", "in place",
    "in place, all mendable", "best interval of restarts", "Daly's interval",
)  # fmt: skip
def shares() -> Iterator[list[str]]:
    """Yield effective times, and best and Daly's interval of restarts."""
    best, mendable, seldom = outcomes(), outcomes(unmendable=0.0), outcomes(HALF_AN_HOUR)
    for first in range(0, len(best), 3):
        restart, local, in_place = best[first : first + 3]
        found = (seldom[first], restart, local, in_place, mendable[first + 2])
        yield [
            f"{restart.nodes:,}", f"{restart.mtbf / 3600:.1f} h",
            *(f"{one.of_all_nodes:.3f}" for one in found),
            f"{restart.interval:.0f} s", f"{restart.daly:.0f} s",
        ]  # fmt: skip


PAGES = {"docs/reliability.md": {"goodput": shares}}
