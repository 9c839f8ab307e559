"""Fit the constants of one cluster file to measured runs, and judge the fit on runs left out."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.constants import LARGEST, Constants, cluster_constants, with_constants
from frontier_llm.planner.fit import damped, fit
from frontier_llm.planner.measured import Errors, MeasuredRun, Prediction, errors, predict

LEAST_ROWS = 3
"""Smallest number of rows to which constants are fitted."""
MOST_FOLDS = 10
"""Largest number of parts that are left out in turn. With at most this many rows, each row is left
out once."""
MOST_FITTED = 300
"""Largest number of rows in a fit; of more rows, evenly spaced ones are used."""


class Fitted(NamedTuple):
    """The constants of a cluster that were fitted to measured runs."""

    start: dict[str, float]
    """Constants of the cluster file."""
    constants: dict[str, float]
    """Fitted constants."""
    before: Errors
    """Errors with the constants of the file."""
    in_sample: Errors
    """Errors with the fitted constants."""
    left_out: Errors
    """Errors of rows with constants that were fitted to other rows."""
    rows: int
    folds: int
    """Number of parts that were left out in turn."""


def fit_cluster(
    runs: Sequence[MeasuredRun], progress: Callable[[str, float], None] = lambda *_: None
) -> Fitted:
    """Fit the constants of the cluster on which all runs were measured.

    Args:
        runs: the measured runs.
        progress: called with the progress.

    Raises:
        ConfigError: there are too few runs, or they were measured on different clusters.
    """
    cluster = _one_cluster(runs)
    start = cluster_constants(cluster, runs[0].candidates[0].layout.precision)
    used = runs[:: -(-len(runs) // MOST_FITTED)]
    folds = min(MOST_FOLDS, len(used))
    progress("fit", 0.0)
    constants = _fit(used, start)
    left_out: list[Prediction] = []
    for fold in range(folds):
        progress("fits without some rows", (fold + 1) / (folds + 1))
        others = [run for index, run in enumerate(used) if index % folds != fold]
        left_out += _predict(used[fold::folds], _fit(others, start))
    return Fitted(
        start,
        constants,
        before=errors([predict(run) for run in used]),
        in_sample=errors(_predict(used, constants)),
        left_out=errors(left_out),
        rows=len(used),
        folds=folds,
    )


def _one_cluster(runs: Sequence[MeasuredRun]) -> ClusterConfig:
    clusters = {c.config.cluster.name: c.config.cluster for run in runs for c in run.candidates}
    if len(clusters) > 1:
        raise ConfigError(
            "--fit",
            f"rows on {len(clusters)} clusters: {', '.join(clusters)}",
            "rows on one cluster, whose constants are fitted",
            "split the table by its column cluster",
        )
    if len(runs) < LEAST_ROWS:
        raise ConfigError(
            "--fit", f"{len(runs)} rows", f"at least {LEAST_ROWS} rows", "measure more runs"
        )
    (cluster,) = clusters.values()
    return cluster


def _fit(runs: Sequence[MeasuredRun], start: Constants) -> dict[str, float]:
    def residuals(constants: Constants) -> list[float]:
        found = _predict(runs, constants)
        return [damped(math.log1p(prediction.error), 1 / len(runs)) for prediction in found]

    return fit(residuals, start, LARGEST)


def _predict(runs: Sequence[MeasuredRun], constants: Constants) -> list[Prediction]:
    change = partial(with_constants, constants=constants)
    return [predict(run, change) for run in runs]
