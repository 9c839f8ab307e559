"""Compare the planner with published training speeds: `python -m benchmarks.planner_accuracy`.

Prints every published value with its prediction. The planner uses constants of the hardware, such
as the efficiency of links, which the files in conf/cluster contain. They were fitted to the
published values. `--fit` fits them again, `--json FILE` writes all values.
docs/generate/planner_page.py writes the tables into docs/planner.md.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.published.fit import fit
from benchmarks.published.predict import Constants, Prediction, predict
from benchmarks.published.published import AMSP, FRONTIER, MEGATRON, SOURCES, Row, rows
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import new_file, run_command, tool_parser

NVIDIA = ("tflops", "half_size", "attention_share", "memory_share", "hidden_share", "near", "far")
"""Constants that are fitted to the published tables of Megatron-LM (A100) and AMSP (A800)
together."""
AMD = ("tflops", "near")
"""Constants that are fitted to the three values for Frontier. The other constants are those of the
A100."""
MEAN_WANTED, WORST_WANTED = 0.06, 0.15
"""Targets for the mean and the worst relative error."""


@dataclass(frozen=True)
class Fits:
    """Constants that were fitted to published values."""

    nvidia: Constants
    """Constants of A100 and A800."""
    frontier: Constants
    """Constants of MI250X."""
    without: dict[str, Constants]
    """Constants fitted without one table, by the name of this table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if the errors exceed MEAN_WANTED or WORST_WANTED."""
    parser = tool_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all values")
    options = parser.parse_args(arguments)
    console = wide_console()
    found = fitted() if options.fit else None
    if found is not None:
        for name, constants in (("A100, A800", found.nvidia), ("MI250X", found.frontier)):
            console.print(name, {key: round(value, 4) for key, value in constants.items()})
    predictions = predict_all(found)
    for table in SOURCES:
        console.print(_table(table, [p for p in predictions if p.row.table == table]))
    mean, worst = errors(predictions)
    console.print(f"mean absolute error {mean:.1%}, worst {worst:.1%}, of the rows that count")
    if options.json:
        options.json.write_text(json.dumps([to_json(p) for p in predictions], indent=1) + "\n")
    return int(mean > MEAN_WANTED or worst > WORST_WANTED)


def predict_all(found: Fits | None = None) -> list[Prediction]:
    """Predict every published value.

    Args:
        found: constants to use; None: those of the cluster files.
    """
    return [predict(row, _constants(row, found)) for row in rows()]


def errors(predictions: Sequence[Prediction]) -> tuple[float, float]:
    """Return the mean and the worst absolute error of the rows that count.

    Papers round: a published 4% stands for any value from 3.5% to 4.5%. The error is the distance
    to the nearest such value.
    """
    absolute = [abs(p.error_beyond_rounding) for p in predictions if p.row.counts]
    return sum(absolute) / len(absolute), max(absolute)


def fitted() -> Fits:
    """Fit the constants of all devices, with all tables and with one table left out."""
    counted = [row for row in rows() if row.counts]
    by_table = {name: [row for row in counted if row.table == name] for name in SOURCES}
    nvidia = fit([*by_table[MEGATRON], *by_table[AMSP]], NVIDIA)
    return Fits(
        nvidia=nvidia,
        frontier=fit(by_table[FRONTIER], AMD, start=nvidia),
        without={
            MEGATRON: fit(by_table[AMSP], NVIDIA),
            AMSP: fit(by_table[MEGATRON], NVIDIA),
            FRONTIER: nvidia,
        },
    )


def left_out() -> Iterator[tuple[str, str, list[Prediction]]]:
    """Predict each table with constants that were fitted without it.

    Yields:
        The table, the origin of the constants in words, and the predictions.
    """
    counted = [row for row in rows() if row.counts]
    by_table = {name: [row for row in counted if row.table == name] for name in SOURCES}
    without = fitted().without
    origins = {
        MEGATRON: "constants fitted to AMSP's table",
        AMSP: "constants fitted to Megatron-LM's table",
        FRONTIER: "the A100's constants, as shares of the peaks",
    }
    for name, constants in without.items():
        yield name, origins[name], [predict(row, constants) for row in by_table[name]]


def to_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values."""
    row = prediction.row
    return {
        "table": row.table,
        "row": row.name,
        "reading": row.reading,
        "counts": row.counts,
        "quantity": row.quantity,
        "published": row.published,
        "predicted": prediction.predicted,
        "error": prediction.error,
        "error_beyond_rounding": prediction.error_beyond_rounding,
        "step_seconds": prediction.estimate.time.seconds,
        "layout": prediction.estimate.candidate.description,
    }


def _constants(row: Row, found: Fits | None) -> Constants | None:
    """Return the fitted constants for the device of a row; None: those of its cluster file."""
    if found is None:
        return None
    return found.frontier if row.table == FRONTIER else found.nvidia


def _table(name: str, predictions: Sequence[Prediction]) -> Table:
    table = Table(title=f"{name}: {SOURCES[name]}", title_justify="left")
    columns = ("model", "assumed set-up", "published", "predicted", "error")
    for column in (*columns, "error beyond rounding"):
        table.add_column(column)
    for prediction in predictions:
        row = prediction.row
        form = _one_decimal if row.quantity == "hardware_tflops" else _percent
        table.add_row(
            row.name,
            row.reading,
            form(row.published),
            form(prediction.predicted),
            f"{prediction.error:+.1%}",
            f"{prediction.error_beyond_rounding:+.1%}",
            style="" if row.counts else "dim",
        )
    return table


def _one_decimal(value: float) -> str:
    return f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


if __name__ == "__main__":
    sys.exit(run_command(main))
