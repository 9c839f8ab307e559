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
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from frontier_lab.option_values import check_writable, write_text
from frontier_lab.sweeps.sweep_trials import (
    ONLY_CHANCE,
    TRIAL_FILE,
    Trial,
    axes,
    done_trials,
    markdown_table,
    pareto,
    peak_memory,
    random_influence,
    ranks_by_chance,
    read_in_order,
    read_with_folders,
    sensitivity,
)
from frontier_lab.sweeps.trial_runner import RUN
from frontier_llm.cli.options import folder, tool_parser
from frontier_llm.telemetry.history import History
from frontier_llm.units import GIB, counted, format_seconds

REPORT, LOSSES = "sweep.md", "losses.svg"
_WORDS = {False: ("faster", "speed"), True: ("better", "validation loss")}
"""What a better trial is and what the axes influence, by whether the search minimises the loss."""
NOISE = 0.3
"""The report warns if axes without influence would have at least this share of the variance."""
_LABELLED = 8
"""Number of trials that the legend of their losses names."""
Curve = Sequence[float]
"""The best value so far of one search, after each of its trials."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a sweep; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("folder", type=folder, help="hydra.sweep.dir of the sweep")
    parser.add_argument(
        "--beside", type=folder, nargs="+", action="extend", default=[], metavar="FOLDER",
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
    points = [History.read(folder / RUN).points("loss") for folder, _ in found]
    check_writable("FOLDER", path)
    losses = {
        name: of_run for name, of_run in zip(_settings(trials), points, strict=True) if of_run
    }
    if losses:
        draw_losses(losses, path / LOSSES)
    text = write(trials, _convergence(path, options.beside, trials[0]), has_losses=bool(losses))
    draw_pareto(trials, path / "pareto.svg")
    write_text(path / REPORT, text, "FOLDER")
    print(text)
    return 0


def write(
    trials: Sequence[Trial],
    searches: Mapping[str, Sequence[Curve]],
    *,
    has_losses: bool = False,
) -> str:
    """Return the report as Markdown."""
    better, influenced = _WORDS[trials[0].goal == "loss"]
    best = f"Best: {_value(trials[0])}: `{_settings(trials)[0]}`"
    if ranks_by_chance(trials[0].goal, axes(trials)):
        best = ONLY_CHANCE
    lines = [
        f"# Sweep: {len(done_trials(trials))} of {counted(len(trials), 'trial')} done",
        "",
        *([best, ""] * bool(pareto(trials))),
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
    own, others = best_so_far(read_in_order(path)), map(best_so_far, map(read_in_order, beside))
    groups = {"this search": [own], "others": list(others)}
    searches = {name: curves for name, curves in groups.items() if curves and all(curves)}
    if searches:
        draw_convergence(searches, any_trial.quantity, path / "convergence.svg")
    return searches


def _settings(trials: Sequence[Trial]) -> list[str]:
    """Return the settings of each trial that differ between trials; all of them if none differ."""
    columns = axes(trials)
    if not columns:
        return [" ".join(trial.overrides) for trial in trials]
    rows = zip(*columns.values(), strict=True)
    return [" ".join(f"{k}={v}" for k, v in zip(columns, row, strict=True)) for row in rows]


def _value(trial: Trial) -> str:
    number = trial.number
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
    rows = []
    for index, trial in enumerate(trials):
        shown = [column[index] for column in values.values()]
        rows.append(
            [
                shown[0] + " *" if trial in front else shown[0],
                *shown[1:],
                f"{peak_memory(trial) / GIB:.2f}" if trial.peak_bytes else "-",
                *(column[index] for column in columns.values()),
                format_seconds(trial.seconds),
                trial.outcome,
            ]
        )
    return markdown_table([*values, "memory GiB", *columns, "duration", "result"], rows)


def sensitivity_table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of the axes and their influence as lines of Markdown."""
    shares = sensitivity(trials)
    shown = {**shares, "combinations of values, and noise": 1 - sum(shares.values())}
    _, influenced = _WORDS[trials[0].goal == "loss"]
    head = ["axis", f"share of the variance of the {influenced}"]
    lines = markdown_table(head, [[name, f"{share:.0%}"] for name, share in shown.items()])
    if (chance := random_influence(trials)) >= NOISE:
        lines += ["", f"With so few trials ({len(trials)}), these shares are mostly noise: axes "
                  f"without any influence would have {chance:.0%} of the variance."]  # fmt: skip
    return lines


def draw_pareto(trials: Sequence[Trial], path: Path) -> None:
    """Draw value against memory of all done trials, and a line through those of `pareto`."""
    figure, axis = _figure()
    front, quantity = pareto(trials), trials[0].quantity
    better = "faster" if trials[0].goal != "loss" else "better"
    axis.scatter(*_memory_and_value(done_trials(trials)), color="#888")
    axis.plot(
        *_memory_and_value(front), "o-", color="#c33", label=f"no trial is {better} and smaller"
    )
    axis.set_xlabel("peak memory of the rank that used most, GiB")
    axis.set_ylabel(quantity)
    if front:
        axis.legend()
    figure.savefig(path)


def draw_losses(runs: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Draw (step, loss in nats per token) of trials over each other, the best first."""
    figure, axis = _figure()
    for number, (settings, points) in enumerate(runs.items()):
        label = settings if number < _LABELLED else None
        axis.plot(*zip(*points, strict=True), label=label, color=None if label else "#ccc")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats per token")
    axis.legend(fontsize="small")
    figure.savefig(path)


def draw_convergence(searches: Mapping[str, Sequence[Curve]], quantity: str, path: Path) -> None:
    """Draw the best value so far: the median and the range of each group of searches.

    The vertical axis shows the values after a fifth of the trials. Failed first trials would
    compress the later differences.
    """
    figure, axis = _figure()
    shown: list[float] = []
    for (name, curves), colour in zip(searches.items(), ("#36c", "#c33", "#393"), strict=False):
        low, middle, high = spread(curves)
        numbers = range(1, len(middle) + 1)
        axis.fill_between(numbers, low, high, step="post", alpha=0.15, color=colour)
        axis.step(numbers, middle, where="post", color=colour, label=name)
        shown += [*low[len(low) // 5 :], *high[len(high) // 5 :]]
    margin = 0.05 * (max(shown) - min(shown)) or 1.0
    axis.set_ylim(min(shown) - margin, max(shown) + margin)
    axis.set_xlabel("trials")
    axis.set_ylabel(f"best so far: {quantity}")
    axis.legend()
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4), layout="constrained")


def _memory_and_value(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    """Return the memory in GiB and the value of each trial."""
    memory = [peak_memory(trial) / GIB for trial in trials]
    return memory, [trial.value for trial in trials]


def best_so_far(trials: Sequence[Trial]) -> list[float]:
    """Return the best value (highest speed or lowest loss) after each trial of a search."""
    best = min if trials and trials[0].goal == "loss" else max
    return list(accumulate((trial.value for trial in trials), best))


def spread(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Return the lowest, median and highest value after each trial of the shortest search."""
    columns = list(zip(*curves, strict=False))
    return [min(c) for c in columns], [median(c) for c in columns], [max(c) for c in columns]


def convergence_table(searches: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Return the best values after some numbers of trials as lines of Markdown.

    A group of several searches is written as its median, and in parentheses its lowest and
    highest value.
    """
    longest = max(len(curve) for curves in searches.values() for curve in curves)
    rows = [
        [str(count), *(_cell([c[count - 1] for c in curves if len(c) >= count]) for curves in
                       searches.values())]
        for count in _counts(longest)
    ]  # fmt: skip
    return markdown_table(["trials", *searches], rows)


def _counts(longest: int) -> list[int]:
    """Return the numbers of trials of the table: 10, 20, 50, 100, ... and the last."""
    counts = [digit * 10**power for power in range(1, 6) for digit in (1, 2, 5)]
    return [*(count for count in counts if count < longest), longest]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
