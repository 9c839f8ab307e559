"""Compare predictions with a table of measured runs: `frontier-llm plan --table FILE.csv`.

The first line of the CSV file that does not begin with `#` names the columns. A column is a key
(`model.hidden`), a group (`cluster`, `model`, `planner.engine`), `ranks`, or one of the measured
quantities of planning/measured.py. `rounding` is the largest rounding error of the measured value,
and `name` labels a row. A cell `1|2|4` stands for values of which the fastest is taken.
"""

import argparse
import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from frontier_lab.option_values import write_json, write_text
from frontier_lab.planning.measured import (
    QUANTITIES,
    Fitted,
    MeasuredRun,
    Prediction,
    changed_cluster,
    errors,
    fit_cluster,
    predict,
)
from frontier_llm.cli.compose import compose, groups
from frontier_llm.cli.console import DelayedProgress, plain_table
from frontier_llm.config import decode
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.decode import keys, nearest
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate, ranks_to_plan
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.memory import fullest

PRINTED = 40
"""Largest number of rows that are printed; the output file has all of them."""
WORST = 5
"""Number of rows whose parts are printed."""


def compare(options: argparse.Namespace, console: Console) -> int:
    """Print and write the predictions for the rows of `--table`; fit constants with `--fit`."""
    path = Path(options.table)
    out = options.out or path.with_name(f"{path.stem}.predicted.csv")
    with DelayedProgress(console) as progress:
        runs = read_table(path, options.overrides, progress)
        predictions = []
        for index, run in enumerate(runs):
            progress("predictions", index / len(runs))
            try:
                predictions.append(predict(run))
            except ConfigError as error:
                key = f"row {run.row}, {error.key}"
                raise ConfigError(key, error.got, error.wants, error.todo) from None
    _print(predictions, console)
    write(out, predictions)
    console.print(f"written: {out}")
    if options.fit:
        with DelayedProgress(console) as progress:
            fitted = fit_cluster(runs, progress)
        _print_fit(runs[0].candidates[0].config.cluster, fitted, len(runs), console)
    return 0


def write(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write every prediction as JSON if the file's name ends so, and otherwise as CSV."""
    rows = [_values(prediction) for prediction in predictions]
    if path.suffix == ".json":
        write_json(str(path), rows, "--out")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue(), "--out")


def _values(prediction: Prediction) -> dict[str, Any]:
    run, time = prediction.run, prediction.estimate.time
    return {
        "row": run.row,
        "name": run.label,
        "quantity": run.quantity,
        "measured": run.measured,
        "predicted": prediction.predicted,
        "error": prediction.error,
        "step_seconds": time.seconds,
        "layout": prediction.estimate.candidate.description,
        **{f"{name}_seconds": seconds for name, seconds in time.parts.items()},
    }


def _print(predictions: Sequence[Prediction], console: Console) -> None:
    """Print the rows, or the worst of many; the parts of the worst; and the mean error."""
    by_error = sorted(predictions, key=lambda prediction: -abs(prediction.error))
    shown = predictions if len(predictions) <= PRINTED else by_error[:PRINTED]
    quantity = predictions[0].run.quantity.removeprefix("measured_").replace("_", " ")
    title = f"Measured and predicted {quantity}"
    if len(shown) < len(predictions):
        title += f": the worst {PRINTED} of {len(predictions)} rows"
    table = plain_table(title, ["row", "run", "measured", "predicted", "error"])
    for prediction in shown:
        run = prediction.run
        numbers = (f"{run.measured:.4g}", f"{prediction.predicted:.4g}", f"{prediction.error:+.1%}")
        table.add_row(str(run.row), run.label, *numbers)
    console.print(table)
    console.print(_parts(by_error[:WORST]))
    mean, worst = errors(predictions)
    console.print(
        f"mean error {mean:.1%}, largest {worst:.1%}, of {len(predictions)} rows", soft_wrap=True
    )


def _parts(predictions: Sequence[Prediction]) -> Table:
    """Return the shares of the parts of a step, for the rows with the largest errors."""
    names = [
        name
        for name in predictions[0].estimate.time.parts
        if any(p.estimate.time.parts[name] > 0 for p in predictions)
    ]
    columns = ["row", "error", "step s", *(name.replace("_", " ") for name in names), "memory"]
    table = plain_table("Largest errors: parts of the predicted step", columns)
    for prediction in predictions:
        time, candidate = prediction.estimate.time, prediction.estimate.candidate
        memory = fullest(candidate).total / budget_bytes(candidate)
        shares = [f"{time.parts[name] / time.seconds:.1%}" for name in names]
        table.add_row(
            str(prediction.run.row), f"{prediction.error:+.1%}", f"{time.seconds:.4g}", *shares,
            f"{memory:.0%}",
        )  # fmt: skip
    table.caption = (
        "memory: predicted share of the device memory; runs with nearly full memory are often "
        "slower than predicted"
    )
    return table


def _print_fit(cluster: ClusterConfig, fitted: Fitted, rows: int, console: Console) -> None:
    """Print what a fit of the cluster's constants gains, and the constants.

    `rows` is the number of rows of the table, of which a fit may use a part.
    """
    table = plain_table(f"Constants of {cluster.name}", ["constant", "in the file", "fitted"])
    for name, value in fitted.constants.items():
        table.add_row(name, f"{fitted.start[name]:.4g}", f"{value:.4g}")
    console.print(table)
    how = f"in {fitted.folds} parts" if fitted.folds < fitted.rows else "one row at a time"
    used = f" of {fitted.rows} evenly spaced rows" if fitted.rows < rows else ""
    console.print(
        f"mean error{used}: {fitted.before.mean:.1%} with the constants of the file; "
        f"{fitted.left_out.mean:.1%} for rows left out of the fit ({how}); "
        f"{fitted.in_sample.mean:.1%} for the fitted rows themselves",
        soft_wrap=True,
    )
    gains = fitted.left_out.mean < fitted.before.mean
    console.print(
        f"to use them, write this into a copy of conf/cluster/{cluster.name}.yaml:"
        if gains
        else "rows left out of the fit are not predicted better, so keep the constants of the file"
    )
    console.print(constants_yaml(changed_cluster(cluster, fitted.constants)), highlight=False)


def constants_yaml(cluster: ClusterConfig) -> str:
    """Return the fitted keys of a cluster file as YAML."""
    calibration = cluster.device.calibration
    products = {
        name: {"tflops": _rounded(curve.tflops)} for name, curve in calibration.products.items()
    }
    shares = ("attention_share", "memory_share", "hidden_share")
    values = {
        "device": {
            "calibration": {
                "products": products,
                **{name: _rounded(getattr(calibration, name)) for name in shares},
            }
        },
        "links": [{"name": k.name, "efficiency": _rounded(k.efficiency)} for k in cluster.links],
    }
    return yaml.safe_dump(values, sort_keys=False)


def _rounded(value: float) -> float:
    return round(value, 3 - math.ceil(math.log10(value))) if value else 0.0


RANKS, NAME, ROUNDING = "ranks", "name", "rounding"
ENGINE = "planner.engine"
GIVE_RANKS = (RANKS, "launch.ranks", "launch.nodes", "planner.nodes")
"""Columns or overrides that give the number of ranks."""
ALTERNATIVES = "|"
"""Separates the values of a cell of which the fastest is taken."""
OTHER_NAMES = {
    "gpus": RANKS,
    "gcds": RANKS,
    "devices": RANKS,
    "nodes": "planner.nodes",
    "measured_tokens_per_second_per_gpu": "measured_tokens_per_second",
}
"""Columns of the tables of other programs, with the column of the same meaning."""
Row = dict[str, str]


def read_table(
    path: Path, overrides: Sequence[str] = (), progress: Callable[[str, float], None] | None = None
) -> list[MeasuredRun]:
    """Read a table and resolve its rows; columns have precedence over the overrides of all rows.

    Raises:
        ConfigError: something in the table is wrong; the error names the row.
    """
    rows = _read(path)
    quantity = _check_columns(path, list(rows[0]), overrides)
    runs = []
    for number, row in enumerate(rows, start=1):
        if progress is not None:
            progress("rows", number / len(rows))
        runs.append(_run(f"{path.name}, row {number}", number, row, quantity, overrides))
    return runs


def _read(path: Path) -> list[Row]:
    """Return the rows of a table, without comments and empty lines."""
    try:
        # utf-8-sig: spreadsheets write a mark before the first character
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        cells = list(csv.reader(line for line in lines if line.strip() and line[0] != "#"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        wants = f"a CSV file that can be read ({error})"
        raise ConfigError("--table", path, wants, "name another file") from None
    if len(cells) < 2:
        wants = "a line that names the columns, and a line per run"
        raise ConfigError("--table", path, wants, "add them")
    columns, rows = [column.strip() for column in cells[0]], []
    for number, row in enumerate(cells[1:], start=1):
        where = f"{path.name}, row {number}"
        if len(row) != len(columns):
            wants = f"{len(columns)} cells, one per column"
            todo = "add or remove cells; quote a cell that contains commas"
            raise ConfigError(where, f"{len(row)} cells", wants, todo)
        rows.append({column: cell.strip() for column, cell in zip(columns, row, strict=True)})
        for column, cell in rows[-1].items():
            if not cell:
                todo = "fill it in; null stands for no value"
                key, wants = f"{where}, {column}", "a value in every cell"
                raise ConfigError(key, "an empty cell", wants, todo)
    return rows


def _check_columns(path: Path, columns: Sequence[str], overrides: Sequence[str]) -> str:
    """Check the names of the columns; return the measured quantity."""
    names = f"{path.name}, names of the columns"
    known = {name for name, _, _ in keys()} | groups().keys()
    known |= {RANKS, NAME, ROUNDING, ENGINE, *QUANTITIES}
    for column in columns:
        if column not in known:
            similar = OTHER_NAMES.get(column) or nearest(column)
            wants = f"keys of the configuration, {RANKS}, {NAME}, {ROUNDING} or "
            todo = f"did you mean {similar}?" if similar else "correct or remove the column"
            raise ConfigError(names, repr(column), wants + ", ".join(QUANTITIES), todo)
    measured = [column for column in columns if column in QUANTITIES]
    if len(measured) != 1:
        got, wants = ", ".join(measured) or "no measured quantity", ", ".join(QUANTITIES)
        todo = "keep or add one column with measured values"
        raise ConfigError(names, got, f"exactly one of {wants}", todo)
    given = {*columns, *(override.partition("=")[0] for override in overrides)}
    if not given & {*GIVE_RANKS, "experiment"}:
        wants = "one of the columns " + ", ".join(GIVE_RANKS)
        raise ConfigError(names, "no number of ranks", wants, f"add a column {RANKS}")
    return measured[0]


def _run(where: str, number: int, row: Row, quantity: str, overrides: Sequence[str]) -> MeasuredRun:
    measured = _number(f"{where}, {quantity}", row[quantity])
    rounding = _number(f"{where}, {ROUNDING}", row.get(ROUNDING, "0"), least=0.0)
    candidates, refused = [], None
    for cells in product(*(cell.split(ALTERNATIVES) for cell in row.values())):
        try:
            candidates.append(candidate_of(dict(zip(row, cells, strict=True)), overrides))
        except ConfigError as error:
            refused = error
    if not candidates:
        assert refused is not None
        raise ConfigError(f"{where}, {refused.key}", refused.got, refused.wants, refused.todo)
    label = row.get(NAME) or " ".join(v for k, v in row.items() if k not in (quantity, ROUNDING))
    return MeasuredRun(number, label, quantity, measured, rounding, tuple(candidates))


def _number(where: str, cell: str, least: float = 1e-12) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        wants = "a number above 0" if least else "a number, 0 or larger"
        raise ConfigError(where, repr(cell), wants, "correct the cell")
    return value


def candidate_of(row: Mapping[str, str], overrides: Sequence[str] = ()) -> Candidate:
    """Resolve a row without alternatives."""
    choices = row.keys() & {*groups(), ENGINE}
    base = tuple(f"{key}={cell}" for key, cell in row.items() if key in choices)
    others = {*choices, RANKS, NAME, ROUNDING, *QUANTITIES}
    cells = {key: cell for key, cell in row.items() if key not in others}
    # a table that does not name the layers of its stages is of runs with equal stages
    config = decode(_composed(("parallel.layers_per_stage=null", *overrides, *base), cells))
    if RANKS in row:
        ranks = row[RANKS]
        if not ranks.isdigit() or int(ranks) < 1:
            raise ConfigError(RANKS, repr(ranks), "a number of ranks", "correct the cell")
        config = config.changed("launch", ranks=int(ranks), nodes=None)
        config = config.changed("planner", nodes=None)
    size, ranks_per_node = ranks_to_plan(config)
    return Candidate.of(choose(config, size, ranks_per_node), size, ranks_per_node)


_OF_CHOICES: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, Any]] = {}
"""Composed values by choices and by the keys of cells, because composing takes a second."""


def _composed(choices: tuple[str, ...], cells: Mapping[str, str]) -> dict[str, Any]:
    """Compose choices with the cells of a row.

    Hydra composes the first row with these choices. Later rows replace the values of its cells.
    """
    known = (choices, tuple(cells))
    if known not in _OF_CHOICES:
        _OF_CHOICES[known] = compose([*choices, *(f"{key}={cell}" for key, cell in cells.items())])
    values = deepcopy(_OF_CHOICES[known])
    for key, cell in cells.items():
        *path, last = key.split(".")
        section = values
        for part in path:
            section = section[part]
        try:
            section[last] = yaml.safe_load(cell)
        except yaml.YAMLError:
            wants = "a value that can be read"
            raise ConfigError(key, repr(cell), wants, "correct the cell") from None
    return values
