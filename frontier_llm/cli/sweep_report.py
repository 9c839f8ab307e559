"""Compare the trials of a sweep: `frontier-llm sweep-report runs/sweep-NAME`.

An axis is a setting that differs between the trials of a sweep. Writes these files into the folder:

    sweep.md          a table of all trials, the best first, and the tables of the charts
    pareto.svg        speed against memory; loss against memory with launch.trial_value=loss
    losses.svg        the training losses of the trials over their steps
    convergence.svg   the best value after each trial

`--beside` adds other searches over the same axes to convergence.svg, for example random ones
(hydra/sweeper/sampler=random). Prints sweep.md.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from frontier_llm.cli.options import folder, tool_parser
from frontier_llm.cli.sweep_charts import draw_convergence, draw_losses, draw_pareto
from frontier_llm.cli.sweep_convergence import Curve, best_so_far, convergence_table
from frontier_llm.cli.sweep_trials import (
    axes,
    by_chance,
    done_trials,
    pareto,
    peak_memory,
    read_in_order,
    read_with_folders,
    sensitivity,
)
from frontier_llm.cli.trial import TRIAL_FILE, Trial
from frontier_llm.cli.trial_runner import RUN
from frontier_llm.telemetry.history import History
from frontier_llm.units import GIB, format_seconds

REPORT, LOSSES = "sweep.md", "losses.svg"
_WORDS = {False: ("faster", "speed"), True: ("better", "validation loss")}
"""What a better trial is and what the axes influence, by whether the search minimises the loss."""
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
    found = read_with_folders(path)
    trials = [trial for _, trial in found]
    for each in (path, *options.beside):
        if not any(each.rglob(TRIAL_FILE)):
            parser.error(
                f"{each} contains no {TRIAL_FILE}: give the folder of a sweep that has run"
            )
    losses = _losses(found)
    if losses:
        draw_losses(losses, path / LOSSES)
    text = write(trials, _convergence(path, options.beside, trials[0]), has_losses=bool(losses))
    draw_pareto(trials, path / "pareto.svg")
    (path / REPORT).write_text(text)
    print(text)
    return 0


def write(
    trials: Sequence[Trial],
    searches: Mapping[str, Sequence[Curve]],
    *,
    has_losses: bool = False,
) -> str:
    """Return the report as Markdown.

    Args:
        trials: the trials, the best first.
        searches: the best values so far of this and of other searches.
        has_losses: whether the losses of the trials are drawn.
    """
    better, influenced = _WORDS[trials[0].goal == "loss"]
    lines = [
        f"# Sweep: {len(done_trials(trials))} of {len(trials)} trials done",
        "",
        *([f"Best: {_value(trials[0])}: `{_settings(trials)[0]}`", ""] * bool(pareto(trials))),
        "Memory is the peak of the rank that used most. An asterisk (*) marks a trial if no other "
        f"trial is both {better} and smaller in memory.",
        "",
        *table(trials),
        "",
        f"## Influence of each axis on the {influenced}",
        "",
        *sensitivity_table(trials),
        "",
        "## Best value so far",
        "",
        *(convergence_table(searches) if searches else []),
        "",
        f"![{influenced} against memory](pareto.svg)",
        *([f"![losses]({LOSSES})"] if has_losses else []),
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
        draw_convergence(searches, any_trial.quantity, path / "convergence.svg")
    return searches


def _losses(found: Sequence[tuple[Path, Trial]]) -> dict[str, list[tuple[int, float]]]:
    """Return the training losses of the trials that have run, by their settings."""
    settings = _settings([trial for _, trial in found])
    points = [History.read(folder / RUN).points("loss") for folder, _ in found]
    return {name: losses for name, losses in zip(settings, points, strict=True) if losses}


def _settings(trials: Sequence[Trial]) -> list[str]:
    """Return the settings of each trial that differ between trials; all of them if none differ."""
    columns = axes(trials)
    if not columns:
        return [" ".join(trial.overrides) for trial in trials]
    rows = zip(*columns.values(), strict=True)
    return [" ".join(f"{k}={v}" for k, v in zip(columns, row, strict=True)) for row in rows]


def _value(trial: Trial) -> str:
    number = f"{trial.value:.4f}" if trial.goal == "loss" else trial.speed_number
    return f"{trial.quantity} {number}" if trial.goal == "loss" else f"{number} {trial.quantity}"


def table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of all trials as lines of Markdown."""
    columns, front = axes(trials), pareto(trials)
    speeds = [t.speed_number if t.status == "done" else "-" for t in trials]
    values = {trials[0].speed_unit: speeds}
    for name, losses in (
        ("loss", [trial.loss for trial in trials]),
        ("validation loss", [trial.validation_loss for trial in trials]),
    ):
        if any(loss is not None for loss in losses):
            values[name] = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
    goal = trials[0].quantity
    values = {goal: values.pop(goal, speeds), **values}  # the value of the search comes first
    head = [*values, "memory GiB", *columns, "duration", "result"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for index, trial in enumerate(trials):
        shown = [column[index] for column in values.values()]
        cells = [
            shown[0] + " *" if trial in front else shown[0],
            *shown[1:],
            f"{peak_memory(trial) / GIB:.2f}" if trial.peak_bytes else "-",
            *(values[index] for values in columns.values()),
            format_seconds(trial.seconds),
            trial.outcome,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def sensitivity_table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of the axes and their influence as lines of Markdown."""
    shares = sensitivity(trials)
    rows = [f"| {key} | {share:.0%} |" for key, share in shares.items()]
    rest = f"| combinations of values, and noise | {1 - sum(shares.values()):.0%} |"
    _, influenced = _WORDS[trials[0].goal == "loss"]
    head = [f"| axis | share of the variance of the {influenced} |", "|---|---|"]
    chance = by_chance(trials)
    if chance < NOISE:
        return [*head, *rows, rest]
    return [
        *head, *rows, rest, "",
        f"With so few trials ({len(trials)}), these shares are mostly noise: axes without any "
        f"influence would have {chance:.0%} of the variance.",
    ]  # fmt: skip
