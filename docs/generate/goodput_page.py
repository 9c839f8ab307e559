"""Write the table of effective training time in docs/reliability.md, and draw its chart.

`python -m docs.generate.goodput_page` checks whether the table and docs/images/goodput.svg are
current; `--write` writes them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.generate.chart_style import digest_comment, svg
from docs.generate.marked_page import filled
from docs.generate.results import ROOT
from frontier_llm.cli import goodput
from frontier_llm.cli.goodput import DEFAULTS, NODES, Outcome, compare, draw, recoveries_of
from frontier_llm.cli.options import run_command, tool_parser
from frontier_llm.planner import effective_time
from frontier_llm.planner.effective_time import RATES

PAGE = ROOT / "docs" / "reliability.md"
CHART = ROOT / "docs" / "images" / "goodput.svg"
VALUES = {name: default.value for name, default in DEFAULTS.items()}
HALF_AN_HOUR = 1800.0
MODULES = (effective_time, goodput)
"""Modules from which the chart follows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table and the chart with `--write`, or report which are out of date."""
    parser = tool_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write them")
    options = parser.parse_args(arguments)
    wanted = filled(PAGE.read_text(), {"goodput": table()})
    if options.write:
        PAGE.write_text(wanted)
        CHART.write_text(svg(lambda: draw(outcomes(), VALUES["step"]), _digest()))
        return 0
    stale = [PAGE.name] if wanted != PAGE.read_text() else []
    if not CHART.exists() or _digest() not in CHART.read_text():
        stale.append(CHART.name)
    for name in stale:
        message = f"{name} is not current: python -m docs.generate.goodput_page --write"
        print(message, file=sys.stderr)
    return 1 if stale else 0


def outcomes(interval: float | None = None, **changed: float) -> list[Outcome]:
    """Simulate the defaults of the command at Llama 3's rate of failures.

    Args:
        interval: seconds between checkpoints; None = the best interval of each way to recover.
        changed: assumptions that differ from their defaults.
    """
    ways = recoveries_of({**VALUES, **changed})
    return compare(ways, NODES, RATES["llama3"], VALUES["step"], interval=interval)


def table() -> Iterator[str]:
    """Yield the lines of the table: effective time, and best and Daly's interval of restarts."""
    yield (
        "| nodes | failure every | restart, 30-minute checkpoints | restart | node-local "
        "| in place | in place, all mendable | best interval of restarts | Daly's interval |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    best, mendable = outcomes(), outcomes(unmendable=0.0)
    seldom = outcomes(HALF_AN_HOUR)
    for first in range(0, len(best), 3):
        restart, local, in_place = best[first : first + 3]
        shares = (seldom[first], restart, local, in_place, mendable[first + 2])
        cells = [f"{restart.nodes:,}", f"{restart.mtbf / 3600:.1f} h"]
        cells += [f"{found.of_all_nodes:.3f}" for found in shares]
        cells += [f"{restart.interval:.0f} s", f"{restart.daly:.0f} s"]
        yield f"| {' | '.join(cells)} |"


def _digest() -> str:
    return digest_comment(__file__, [Path(str(module.__file__)).read_bytes() for module in MODULES])


if __name__ == "__main__":
    sys.exit(run_command(main))
