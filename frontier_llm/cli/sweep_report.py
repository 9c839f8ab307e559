"""Compare the trials of a sweep: `frontier-llm sweep-report runs/sweep-NAME`.

Writes sweep.md into that folder (all trials, the fastest first, and which axes matter), pareto.svg
(speed against memory) and sensitivity.svg. Prints sweep.md.
"""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from frontier_llm.cli.options import folder, tool_parser
from frontier_llm.cli.trial import TRIAL_FILE, Trial
from frontier_llm.units import GIB, format_count, format_seconds

REPORT = "sweep.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a sweep; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("folder", type=folder, help="hydra.sweep.dir of the sweep")
    path: Path = parser.parse_args(arguments).folder
    trials = read(path)
    if not trials:
        parser.error(f"{path} contains no {TRIAL_FILE}: give the folder of a sweep that has run")
    text = write(trials)
    draw_pareto(trials, path / "pareto.svg")
    draw_sensitivity(trials, path / "sensitivity.svg")
    (path / REPORT).write_text(text)
    print(text)
    return 0


def read(sweep_dir: Path) -> list[Trial]:
    """Read all trials of a sweep, the fastest first.

    Raises:
        DataError: the file of a trial is damaged.
    """
    found = [Trial.read(path.parent) for path in sweep_dir.rglob(TRIAL_FILE)]
    return sorted(found, key=lambda trial: -trial.tokens_per_second)


def axes(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """Return the keys that have more than one value in a sweep.

    Returns:
        For each key its values in the order of the trials; `-` for a trial that does not set it.
    """
    settings = [dict(o.lstrip("+").split("=", 1) for o in trial.overrides) for trial in trials]
    keys = sorted({key for setting in settings for key in setting})
    columns = {key: [setting.get(key, "-") for setting in settings] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def sensitivity(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the share of the variance of the speed that each axis explains, largest first.

    The share of an axis is the variance between the mean speeds of its values, weighted by their
    numbers of trials, divided by the total variance. It is 0 for an axis without influence and 1
    for an axis that alone determines the speed. A trial that is not done has speed 0, as it has in
    the search, because an axis whose values fail matters.
    """
    total = pvariance([trial.tokens_per_second for trial in trials])
    shares = {key: _variance_between(values, trials) / total if total else 0.0
              for key, values in axes(trials).items()}  # fmt: skip
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the done trials that no other trial beats in both speed and memory, fastest first."""
    best: list[Trial] = []
    for trial in sorted(_done(trials), key=lambda t: (-t.tokens_per_second, _memory(t))):
        if not best or _memory(trial) < _memory(best[-1]):
            best.append(trial)
    return best


def write(trials: Sequence[Trial]) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# Sweep: {len(_done(trials))} of {len(trials)} trials done",
        "",
        "Memory is the peak of the rank that used most. * = no trial is both faster and smaller.",
        "",
        *table(trials),
        "",
        "## Which axes matter",
        "",
        *sensitivity_table(trials),
        "",
        "![speed against memory](pareto.svg)",
        "![sensitivity](sensitivity.svg)",
        "",
    ]
    return "\n".join(lines)


def table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of all trials as lines of Markdown."""
    columns, done, front = axes(trials), _done(trials), pareto(trials)
    head = ["tokens/s", "memory GiB", *columns, "duration", "result"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for index, trial in enumerate(trials):
        mark = " *" if trial in front else ""
        cells = [
            format_count(trial.tokens_per_second) + mark if trial in done else "-",
            f"{_memory(trial) / GIB:.2f}" if trial.peak_bytes else "-",
            *(values[index] for values in columns.values()),
            format_seconds(trial.seconds),
            _outcome(trial),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def sensitivity_table(trials: Sequence[Trial]) -> list[str]:
    """Return the table of the axes and their influence as lines of Markdown."""
    rows = [f"| {key} | {share:.0%} |" for key, share in sensitivity(trials).items()]
    return ["| axis | share of the variance of the speed |", "|---|---|", *rows]


def draw_pareto(trials: Sequence[Trial], path: Path) -> None:
    """Draw speed against memory of all done trials, and a line through the best ones."""
    figure, axis = _figure()
    done, front = _done(trials), pareto(trials)
    axis.scatter(
        [_memory(t) / GIB for t in done], [t.tokens_per_second for t in done], color="#888"
    )
    axis.plot(
        [_memory(t) / GIB for t in front], [t.tokens_per_second for t in front],
        "o-", color="#c33", label="no trial is both faster and smaller",
    )  # fmt: skip
    axis.set_xlabel("peak memory of the rank that used most, GiB")
    axis.set_ylabel("tokens per second")
    if front:
        axis.legend()
    figure.savefig(path)


def draw_sensitivity(trials: Sequence[Trial], path: Path) -> None:
    """Draw the share of the variance of the speed that each axis explains."""
    figure, axis = _figure()
    shares = sensitivity(trials)
    axis.barh(list(shares)[::-1], list(shares.values())[::-1], color="#36c")
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the variance of tokens per second")
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4), layout="constrained")


def _variance_between(values: Sequence[str], trials: Sequence[Trial]) -> float:
    """Return the variance of the speeds if each trial had the mean speed of its value."""
    groups: dict[str, list[float]] = defaultdict(list)
    for value, trial in zip(values, trials, strict=True):
        groups[value].append(trial.tokens_per_second)
    return pvariance([fmean(group) for group in groups.values() for _ in group])


def _done(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.status == "done"]


def _memory(trial: Trial) -> int:
    return trial.peak_bytes or 0


def _outcome(trial: Trial) -> str:
    """Return the status and, if the trial is not done, the line of its output that says why."""
    lines = [line.strip() for line in trial.reason.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("got:")), lines[-1] if lines else "")
    reason = textwrap.shorten(why.replace("|", "/"), 100, placeholder=" ...")
    return f"{trial.status}: {reason}" if reason else trial.status
