"""Make the report of a sweep: `python tools/sweep_report.py runs/sweep-NAME`.

Writes into that folder `sweep.md` (all points, the fastest first, and which axes mattered),
`pareto.svg` (speed against memory) and `sensitivity.svg`; prints sweep.md.
"""

import argparse
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.units import GIB, format_count, format_seconds
from tools.options import ending
from tools.point import POINT_FILE, Point

REPORT = "sweep.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report of a sweep; return the exit code."""
    parser = argparse.ArgumentParser(description="Make the report of a sweep (train.py -m).")
    parser.add_argument("folder", type=Path, help="hydra.sweep.dir of the sweep")
    folder = parser.parse_args(arguments).folder
    points = read(folder)
    if not points:
        parser.error(f"{folder} holds no {POINT_FILE}: give the folder of a sweep that has run")
    text = write(points)
    draw_pareto(points, folder / "pareto.svg")
    draw_sensitivity(points, folder / "sensitivity.svg")
    (folder / REPORT).write_text(text)
    print(text)
    return 0


def read(folder: Path) -> list[Point]:
    """Read all points of a sweep, the fastest first.

    Raises:
        DataError: a point's file is damaged.
    """
    found = [Point.read(path.parent) for path in folder.rglob(POINT_FILE)]
    return sorted(found, key=lambda point: -point.tokens_per_second)


def axes(points: Sequence[Point]) -> dict[str, list[str]]:
    """Return the keys that have more than one value in a sweep, each with its value in each point.

    Returns:
        By key, values in the order of the points; `-` where a point does not set the key.
    """
    settings = [dict(o.lstrip("+").split("=", 1) for o in p.overrides) for p in points]
    keys = sorted({key for setting in settings for key in setting})
    columns = {key: [setting.get(key, "-") for setting in settings] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def sensitivity(points: Sequence[Point]) -> dict[str, float]:
    """Return how much of the variance of the speed each axis explains by itself, largest first.

    The variance of the means of its values, weighted by their numbers, over the whole variance:
    0 for an axis that changes nothing, 1 for one that decides alone. Points that are not done count
    with speed 0, as they do in the search: an axis whose values fail matters.
    """
    whole = pvariance([point.tokens_per_second for point in points])
    shares = {key: _between(values, points) / whole if whole else 0.0
              for key, values in axes(points).items()}  # fmt: skip
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the done points that no other beats in both speed and memory, the fastest first."""
    best: list[Point] = []
    for point in sorted(_done(points), key=lambda p: (-p.tokens_per_second, _memory(p))):
        if not best or _memory(point) < _memory(best[-1]):
            best.append(point)
    return best


def write(points: Sequence[Point]) -> str:
    """Write the report as Markdown."""
    lines = [
        f"# Sweep: {len(_done(points))} of {len(points)} points done",
        "",
        "Memory is what the fullest rank held at most. * = no point is both faster and smaller.",
        "",
        *table(points),
        "",
        "## Which axes matter",
        "",
        *sensitivity_table(points),
        "",
        "![speed against memory](pareto.svg)",
        "![sensitivity](sensitivity.svg)",
        "",
    ]
    return "\n".join(lines)


def table(points: Sequence[Point]) -> list[str]:
    """Return the table of all points, as Markdown."""
    columns, done, front = axes(points), _done(points), pareto(points)
    head = ["tokens/s", "memory GiB", *columns, "took", "came to"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for index, point in enumerate(points):
        mark = " *" if point in front else ""
        cells = [
            format_count(point.tokens_per_second) + mark if point in done else "-",
            f"{_memory(point) / GIB:.2f}" if point.peak_bytes else "-",
            *(values[index] for values in columns.values()),
            format_seconds(point.seconds),
            _outcome(point),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def sensitivity_table(points: Sequence[Point]) -> list[str]:
    """Return which axes matter, as Markdown."""
    rows = [f"| {key} | {share:.0%} |" for key, share in sensitivity(points).items()]
    return ["| axis | share of the variance of the speed |", "|---|---|", *rows]


def draw_pareto(points: Sequence[Point], path: Path) -> None:
    """Draw speed against memory of all done points, the best ones joined."""
    figure, axis = _figure()
    done, front = _done(points), pareto(points)
    axis.scatter(
        [_memory(p) / GIB for p in done], [p.tokens_per_second for p in done], color="#888"
    )
    axis.plot(
        [_memory(p) / GIB for p in front], [p.tokens_per_second for p in front],
        "o-", color="#c33", label="no point is both faster and smaller",
    )  # fmt: skip
    axis.set_xlabel("memory of the fullest rank, GiB")
    axis.set_ylabel("tokens a second")
    if front:
        axis.legend()
    figure.savefig(path)


def draw_sensitivity(points: Sequence[Point], path: Path) -> None:
    """Draw how much of the variance of the speed each axis explains."""
    figure, axis = _figure()
    shares = sensitivity(points)
    axis.barh(list(shares)[::-1], list(shares.values())[::-1], color="#36c")
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the variance of tokens a second")
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4), layout="constrained")


def _between(values: Sequence[str], points: Sequence[Point]) -> float:
    """Return the variance of the speeds if each point had the mean of its value."""
    groups: dict[str, list[float]] = defaultdict(list)
    for value, point in zip(values, points, strict=True):
        groups[value].append(point.tokens_per_second)
    return pvariance([fmean(group) for group in groups.values() for _ in group])


def _done(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.status == "done"]


def _memory(point: Point) -> int:
    return point.peak_bytes or 0


def _outcome(point: Point) -> str:
    """Say the status, and of a point that is not done the line that says why."""
    lines = [line.strip() for line in point.reason.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("got:")), lines[-1] if lines else "")
    said = textwrap.shorten(why.replace("|", "/"), 100, placeholder=" ...")
    return f"{point.status}: {said}" if said else point.status


if __name__ == "__main__":
    sys.exit(ending(main))
