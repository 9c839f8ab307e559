"""Compare predictions with a table of measured runs: `frontier-llm plan --table FILE.csv`."""

import argparse
import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from frontier_llm.cli.delayed_progress import DelayedProgress
from frontier_llm.cli.measured_table import read_table
from frontier_llm.cli.plain_table import plain_table
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.estimate import budget_bytes
from frontier_llm.planner.measured import (
    Fitted,
    MeasuredRun,
    Prediction,
    changed_cluster,
    errors,
    fit_cluster,
    predict,
)
from frontier_llm.planner.memory import fullest
from frontier_llm.planner.search import Progress

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
        predictions = _predict(runs, progress)
    _print(predictions, console)
    write(out, predictions)
    console.print(f"written: {out}")
    if options.fit:
        with DelayedProgress(console) as progress:
            fitted = fit_cluster(runs, progress)
        _print_fit(runs[0].candidates[0].config.cluster, fitted, len(runs), console)
    return 0


def write(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write every prediction as JSON if the file's name ends so, and otherwise as CSV.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = [_values(prediction) for prediction in predictions]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".json":
                file.write(json.dumps(rows, indent=1) + "\n")
            else:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    except OSError as error:
        raise ConfigError(
            "--out", path, f"a file that can be written ({error.strerror})", "name another file"
        ) from None


def _predict(runs: Sequence[MeasuredRun], progress: Progress) -> list[Prediction]:
    predictions = []
    for index, run in enumerate(runs):
        progress("predictions", index / len(runs))
        try:
            predictions.append(predict(run))
        except ConfigError as error:
            key = f"row {run.row}, {error.key}"
            raise ConfigError(key, error.got, error.wants, error.todo) from None
    return predictions


def _values(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values, with the seconds of the parts of a step."""
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
