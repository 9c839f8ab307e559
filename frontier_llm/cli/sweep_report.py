"""Compare the trials of a sweep: `frontier-llm sweep-report runs/sweep-NAME`.

An axis is a setting that differs between the trials of a sweep. Writes these files into the folder:

    sweep.md          a table of all trials, the fastest first, and the tables of the charts
    pareto.svg        speed against memory
    convergence.svg   the best value after each trial

`--beside` adds other searches over the same axes to convergence.svg, for example random ones
(hydra/sweeper/sampler=random). Prints sweep.md.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from frontier_llm.cli.options import folder, tool_parser
from frontier_llm.cli.sweep_charts import draw_convergence, draw_pareto
from frontier_llm.cli.sweep_convergence import Curve, best_so_far, convergence_table
from frontier_llm.cli.sweep_trials import (
    axes,
    by_chance,
    done_trials,
    pareto,
    peak_memory,
    read,
    read_in_order,
    sensitivity,
)
from frontier_llm.cli.trial import TRIAL_FILE, Trial
from frontier_llm.units import GIB, format_seconds

REPORT = "sweep.md"
NOISE = 0.3
"""The report warns if axes without influence would have at least this share of the variance."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a sweep; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("folder", type=folder, help="hydra.sweep.dir of the sweep")
    parser.add_argument(
        "--beside", type=folder, nargs="+", default=[], metavar="FOLDER",
        help="folders of other searches whose convergence is shown beside that of the sweep",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    path: Path = options.folder
    trials = read(path)
    for each in (path, *options.beside):
        if not any(each.rglob(TRIAL_FILE)):
            parser.error(
                f"{each} contains no {TRIAL_FILE}: give the folder of a sweep that has run"
            )
    text = write(trials, _convergence(path, options.beside, trials[0]))
    draw_pareto(trials, path / "pareto.svg")
    (path / REPORT).write_text(text)
    print(text)
    return 0


def write(
    trials: Sequence[Trial],
    searches: Mapping[str, Sequence[Curve]],
) -> str:
    """Return the report as Markdown.

    Args:
        trials: the trials, the fastest first.
        searches: the best values so far of this and of other searches.
    """
    lines = [
        f"# Sweep: {len(done_trials(trials))} of {len(trials)} trials done",
        "",
        "Memory is the peak of the rank that used most. An asterisk (*) marks a trial if no other "
        "trial is both faster and smaller in memory.",
        "",
        *table(trials),
        "",
        "## Influence of each axis on the speed",
        "",
        *sensitivity_table(trials),
        "",
        "## Best value so far",
        "",
        *(convergence_table(searches) if searches else []),
        "",
        "![speed against memory](pareto.svg)",
        *(["![convergence](convergence.svg)"] if searches else []),
        "",
    ]
    return "\n".join(lines)


def _convergence(
    path: Path, beside: Sequence[Path], any_trial: Trial
) -> dict[str, list[list[float]]]:
    """Compute and draw the convergence of a search and of others."""
    own, others = best_so_far(read_in_order(path)), map(best_so_far, map(read_in_order, beside))
    groups = {"this search": [own], "others": list(others)}
    searches = {name: curves for name, curves in groups.items() if curves and all(curves)}
    if searches:
        quantity = "loss" if any_trial.goal == "loss" else any_trial.speed_unit
        draw_convergence(searches, quantity, path / "convergence.svg")
    return searches


def table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of all trials as lines of Markdown."""
    columns, front = axes(trials), pareto(trials)
    head = [trials[0].speed_unit, "memory GiB", *columns, "duration", "result"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for index, trial in enumerate(trials):
        asterisk = " *" if trial in front else ""
        cells = [
            trial.speed_number + asterisk if trial.status == "done" else "-",
            f"{peak_memory(trial) / GIB:.2f}" if trial.peak_bytes else "-",
            *(values[index] for values in columns.values()),
            format_seconds(trial.seconds),
            _outcome(trial),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def sensitivity_table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of the axes and their influence as lines of Markdown."""
    shares = sensitivity(trials)
    rows = [f"| {key} | {share:.0%} |" for key, share in shares.items()]
    rest = f"| combinations of values, and noise | {1 - sum(shares.values()):.0%} |"
    head = ["| axis | share of the variance of the speed |", "|---|---|"]
    chance = by_chance(trials)
    if chance < NOISE:
        return [*head, *rows, rest]
    return [
        *head, *rows, rest, "",
        f"With so few trials ({len(trials)}), these shares are mostly noise: axes without any "
        f"influence would have {chance:.0%} of the variance.",
    ]  # fmt: skip


def _outcome(trial: Trial) -> str:
    """Return the status and, if the trial is not done, the line of its output with the reason."""
    lines = [line.strip() for line in trial.reason.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    reason_line = next((line for line in lines if line.startswith("got:")), last)
    reason = textwrap.shorten(reason_line.replace("|", "/"), 100, placeholder=" ...")
    return f"{trial.status}: {reason}" if reason else trial.status
