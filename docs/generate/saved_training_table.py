"""The tables of docs/benchmarks.md with savers compared inside training.

Their rows are in benchmarks/results/saved_training.json, as benchmarks/checkpoint_in_training.py
writes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def every_step(results: Row) -> Iterator[str]:
    """Yield the table of saves after every step, for all numbers of ranks.

    Args:
        results: the content of the JSON file.
    """
    yield (
        "| ranks | saver | blocked, ms per save | end to end, ms per step | slowdown "
        "| lower bound, ms per step |"
    )
    yield "|" + "---|" * 6
    for case in results["cases"]:
        yield f"| {case['ranks']} | no saves |  | {_spread(case['plain_ms'], 0)} |  |  |"
        for row in _comparison(case, 1)["rows"]:
            yield (
                f"| {case['ranks']} | `{row['saver']}` | {_spread(row['blocked_ms'], 1)} "
                f"| {_spread(row['end_to_end_ms'], 0)} | {_spread(row['slowdown'], 2)} "
                f"| {row['bound_ms']:.0f} |"
            )


def targets(results: Row) -> Iterator[str]:
    """Yield the targets with a save after every step, and the machine and its load."""
    yield "| ranks | ratio | target | measured | ratio of the lower bounds | |"
    yield "|" + "---|" * 6
    for case in results["cases"]:
        for target in _comparison(case, 1)["targets"]:
            bound = target["ratio_of_bounds"]
            yield (
                f"| {case['ranks']} | {_in_code(target['name'])} | {target['target']:.3g} "
                f"| {_ratio(target['ratio'])} | {'' if bound is None else f'{bound:.2f}'} "
                f"| {'met' if target['is_met'] else 'missed'} |"
            )
    yield ""
    rounds = ", ".join(str(case["rounds"]) for case in results["cases"])
    ranks = ", ".join(str(case["ranks"]) for case in results["cases"])
    others = [
        value for case in results["cases"] for v in case["other_cores"].values() for value in v
    ]
    yield (
        f"Measured on {results['cores']} cores of an {results['processor']} ({results['date']}, "
        f"torch {results['torch']}; `{results['command']}`): {rounds} rounds for {ranks} ranks."
        f" Other programs used {min(others):.1f} to {max(others):.1f} cores meanwhile, "
        f"{sum(others) / len(others):.1f} on average."
    )


def _comparison(case: Row, every: int) -> Row:
    """Return the comparison of a case with this interval between saves."""
    found: Sequence[Row] = case["comparisons"]
    return next(comparison for comparison in found if comparison["every"] == every)


def _spread(values: Row, digits: int) -> str:
    """Return a median with the smallest and the largest of the rounds."""
    median, least, most = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({least}, {most})"


def _ratio(values: Row) -> str:
    """Return a ratio with four digits, so that a target that is just missed differs from it."""
    median, least, most = (f"{values[key]:.4g}" for key in ("median", "min", "max"))
    return f"{median} ({least}, {most})"


def _in_code(name: str) -> str:
    """Return the name of a ratio, `PART, SAVER over SAVER`, with the savers as code."""
    part, _, ratio = name.partition(", ")
    one, _, other = ratio.partition(" over ")
    return f"{part}, `{one}` over `{other}`"
