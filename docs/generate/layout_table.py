"""The table of docs/planner.md with planned and measured layouts of CPU ranks.

Its rows are in benchmarks/results/planner_layouts.json, as benchmarks/planner_layouts.py writes
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any


def layouts(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        results: the content of the JSON file.
    """
    rows: Sequence[Mapping[str, Any]] = results["rows"]
    yield "| layout | planned, ms | measured, ms | error | planned, MiB | measured, MiB | error |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['layout']} | {row['planned_seconds'] * 1e3:.0f} | {row['seconds'] * 1e3:.0f} "
            f"| {row['time_error']:+.1%} | {row['planned_bytes'] / 2**20:.1f} "
            f"| {row['peak_bytes'] / 2**20:.1f} | {row['memory_error']:+.1%} |"
        )
    time, memory = (mean(abs(row[key]) for row in rows) for key in ("time_error", "memory_error"))
    yield f"| mean of absolute errors | | | {time:.1%} | | | {memory:.1%} |"
    yield ""
    sizes = results["sizes"]
    yield (
        f"Measured on {results['cores']} cores of an {results['processor']} ({results['date']}, "
        f"torch {results['torch']}), with a GPT of {sizes['layers']} layers and a width of "
        f"{sizes['hidden']}, samples of {sizes['sequence']} tokens and {sizes['batch']} samples "
        f"per step; {results['rounds'] * results['steps']} timed steps per layout."
    )
    disturbed = [row["layout"] for row in rows if row["is_disturbed"]]
    if disturbed:
        yield f"Other programs ran during all steps of {', '.join(disturbed)}."
