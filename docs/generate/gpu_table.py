"""The section of docs/gpu.md with the results of `make gpu` (benchmarks/results/gpu.json)."""

from collections.abc import Iterator, Mapping
from typing import Any

NOTHING = (
    "**Nothing on this page has been measured on a GPU.** The tests below show that the code is "
    "correct as far as this can",
    "be shown without one. They do not show how fast it is.",
)


def measured(results: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the lines of the section.

    Args:
        results: as benchmarks/gpu.py writes them; None if there are none.
    """
    if not results or not results["slices"]:
        yield from NOTHING
        return
    slices = results["slices"]
    dates = sorted({result["date"] for result in slices.values()})
    yield f"Measured on {results['hardware']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))},"
    yield f"by `{results['command']}`. A slice that is not in the table was not run."
    yield ""
    yield "| slice | what it does | result | seconds |"
    yield "|---|---|---|---|"
    for name, result in slices.items():
        failed = result["error"] and f"failed: {result['error']}"
        yield _row(name, result["checks"], failed or "passed", result["seconds"])
    yield ""
    yield "| slice | measured | value |"
    yield "|---|---|---|"
    for name, result in slices.items():
        for row in result["rows"]:
            yield _row(name, row["what"], row["value"])


def _row(*cells: object) -> str:
    """Return a row of a table; line breaks and bars would end a cell."""
    texts = (" ".join(str(cell).replace("|", "/").split()) for cell in cells)
    return f"| {' | '.join(texts)} |"
