"""Hold the planner against published figures: `python tools/validate_planner.py`.

Prints every figure with what is predicted for it; `--fit` finds the constants of the cluster files
anew, `--json FILE` writes all of it. docs/planner.md has the tables (tools/planner_page.py).
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.console import wide_console
from tools.options import ending, new_file, tool_parser
from tools.validation.fit import fit
from tools.validation.predict import Constants, Prediction, predict
from tools.validation.published import AMSP, FRONTIER, MEGATRON, SOURCES, Row, rows

NVIDIA = ("tflops", "half_size", "attention_share", "memory_share", "hidden_share", "near", "far")
"""What the tables of Megatron-LM and AMSP, on A100 and A800, are fitted by together."""
AMD = ("tflops", "near")
"""What Frontier's three figures are fitted by; the rest is the A100's."""
MEAN_WANTED, WORST_WANTED = 0.06, 0.15


@dataclass(frozen=True)
class Fits:
    """Constants by device, and by which table was left out of them."""

    nvidia: Constants
    frontier: Constants
    without: dict[str, Constants]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 where the errors are larger than what is wanted."""
    parser = tool_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures")
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
    console.print(f"mean absolute error {mean:.1%}, worst {worst:.1%}, of the readings that count")
    if options.json:
        options.json.write_text(json.dumps([to_json(p) for p in predictions], indent=1) + "\n")
    return int(mean > MEAN_WANTED or worst > WORST_WANTED)


def predict_all(found: Fits | None = None) -> list[Prediction]:
    """Predict every figure, by the constants of the cluster files or by others."""
    return [predict(row, _constants(row, found)) for row in rows()]


def errors(predictions: Sequence[Prediction]) -> tuple[float, float]:
    """Return the mean and the worst absolute error of the readings that count.

    An error begins where rounding ends: 4% is printed for anything from 3.5% to 4.5%.
    """
    sizes = [abs(p.error_beyond_rounding) for p in predictions if p.row.counts]
    return sum(sizes) / len(sizes), max(sizes)


def fitted() -> Fits:
    """Fit the constants of all devices, and those that leave one table out."""
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
    """Yield each table predicted by constants that have not seen it: (table, words, rows)."""
    counted = [row for row in rows() if row.counts]
    by_table = {name: [row for row in counted if row.table == name] for name in SOURCES}
    without = fitted().without
    words = {
        MEGATRON: "constants fitted to AMSP's table",
        AMSP: "constants fitted to Megatron-LM's table",
        FRONTIER: "the A100's constants, as shares of the peaks",
    }
    for name, constants in without.items():
        yield name, words[name], [predict(row, constants) for row in by_table[name]]


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
    if found is None:
        return None
    return found.frontier if row.table == FRONTIER else found.nvidia


def _table(name: str, predictions: Sequence[Prediction]) -> Table:
    table = Table(title=f"{name}: {SOURCES[name]}", title_justify="left")
    for column in ("figure", "reading", "printed", "predicted", "error", "beyond rounding"):
        table.add_column(column)
    for prediction in predictions:
        row = prediction.row
        scale = (lambda v: f"{v:.1f}") if row.quantity == "hardware_tflops" else _percent
        table.add_row(
            row.name,
            row.reading,
            scale(row.published),
            scale(prediction.predicted),
            f"{prediction.error:+.1%}",
            f"{prediction.error_beyond_rounding:+.1%}",
            style="" if row.counts else "dim",
        )
    return table


def _percent(share: float) -> str:
    return f"{share:.1%}"


if __name__ == "__main__":
    sys.exit(ending(main))
