"""Compare the trials of a sweep: `frontier-llm sweep-report runs/sweep-NAME`.

An axis is a setting that differs between the trials of a sweep. Writes three files into the folder:
sweep.md (a table of all trials, the fastest first, and the influence of each axis on the speed),
pareto.svg (speed against memory) and sensitivity.svg (influence of each axis). Prints sweep.md.
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
    settings = [
        dict(override.lstrip("+").split("=", 1) for override in trial.overrides) for trial in trials
    ]
    keys = sorted({key for setting in settings for key in setting})
    columns = {key: [setting.get(key, "-") for setting in settings] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def sensitivity(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the share of the variance of the speed that each axis explains, largest first.

    For each value of an axis, take the mean speed of the trials with this value. The share is the
    variance of these means, weighted by their numbers of trials, divided by the variance of all
    speeds. An axis without influence has the share 0. An axis that alone determines the speed has
    the share 1. A trial that is not done counts with speed 0, so that an axis whose values fail has
    influence.
    """
    total = pvariance([trial.tokens_per_second for trial in trials])
    shares = {key: _variance_between(values, trials) / total if total else 0.0
              for key, values in axes(trials).items()}  # fmt: skip
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the done trials that no other trial beats in both speed and memory, fastest first."""
    front: list[Trial] = []
    by_speed = sorted(_done(trials), key=lambda trial: (-trial.tokens_per_second, _memory(trial)))
    for trial in by_speed:
        if not front or _memory(trial) < _memory(front[-1]):
            front.append(trial)
    return front


def write(trials: Sequence[Trial]) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# Sweep: {len(_done(trials))} of {len(trials)} trials done",
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
        asterisk = " *" if trial in front else ""
        cells = [
            format_count(trial.tokens_per_second) + asterisk if trial in done else "-",
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
    """Draw speed against memory of all done trials, and a line through those of `pareto`."""
    figure, axis = _figure()
    done, front = _done(trials), pareto(trials)
    axis.scatter(*_memory_and_speed(done), color="#888")
    axis.plot(
        *_memory_and_speed(front), "o-", color="#c33", label="no trial is both faster and smaller"
    )
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


def _memory_and_speed(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    """Return the memory in GiB and the speed in tokens per second of each trial."""
    memory = [_memory(trial) / GIB for trial in trials]
    return memory, [trial.tokens_per_second for trial in trials]


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
    """Return the status and, if the trial is not done, the line of its output with the reason."""
    lines = [line.strip() for line in trial.reason.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    reason_line = next((line for line in lines if line.startswith("got:")), last)
    reason = textwrap.shorten(reason_line.replace("|", "/"), 100, placeholder=" ...")
    return f"{trial.status}: {reason}" if reason else trial.status
