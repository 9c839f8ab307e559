"""Compare predictions with measured runs, and fit the constants of a cluster file to them.

A measured run is a row of a table (plan_measured.py). If the table leaves a part of a set-up
open, a run has several candidates, and the fastest one is taken.

Factors on the starting values of constants are fitted by least squares. The residual of a run is
the logarithm of predicted over measured, damped beyond 10% so that single slow runs do not decide a
constant. Each constant is drawn towards its starting value: a change by a factor of e^`SPREAD`
counts as much as a mean error of 1% in a table. Equal inputs give equal results.

| constant | meaning |
|---|---|
| `product_share` | speed of large matrix products as a share of the device's peak |
| `attention_share` | speed of fused attention as a share of that of large products |
| `memory_share` | share of the memory bandwidth that element-wise kernels reach |
| `hidden_share` | share of overlapping communication that is hidden |
| `near`, `far` | efficiency of the links inside a node, and between nodes |
| `elementwise_factor` | bytes of the engine's element-wise kernels, relative to fused kernels |
| `layer_us`, `micro_batch_us` | times of the engine on the host |
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.engine import EngineConfig
from frontier_llm.errors import ConfigError, install_command
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.step_time import step_time

QUANTITIES: dict[str, Callable[[Estimate], float]] = {
    "measured_step_seconds": lambda estimated: estimated.time.seconds,
    "measured_tflops": lambda estimated: estimated.model_tflops,
    "measured_hfu_tflops": lambda estimated: estimated.hardware_tflops,
    "measured_tokens_per_second": lambda estimated: estimated.tokens_per_device,
}
"""The measured quantities, by name of their column. All but the first are per device."""
SPREAD = 0.2
"""Expected error of the logarithm of a starting value."""
MEAN_ERROR = 0.01
"""Mean relative error of a table that weighs as much as a change of one constant by SPREAD."""
DAMPED_ABOVE = 0.1
"""Residuals grow in proportion up to about this size, and more slowly beyond it."""
SMALLEST_FACTOR = 1e-3
"""Smallest fitted value of a constant, relative to its starting value."""
STEP = 0.02
"""Relative change of a constant from which derivatives are computed."""
ROUNDS = 25
LEAST_GAIN = 0.002
"""The fit ends if a round reduces the sum of squares by less than this share."""
LEAST_ROWS = 3
"""Smallest number of rows to which constants are fitted."""
MOST_FOLDS = 10
"""Largest number of parts that are left out in turn."""
MOST_FITTED = 300
"""Largest number of rows in a fit; of more rows, evenly spaced ones are used."""
Constants = Mapping[str, float]
"""Values of some constants, by name."""
CALIBRATION = ("attention_share", "memory_share", "hidden_share")
HOST = ("layer_us", "micro_batch_us", "tensor_wait_us")
PROGRAM = ("product_ratio", "elementwise_factor", "refresh_owner_us")
LARGEST: Constants = {
    "product_share": 0.95,
    "attention_share": 1.0,
    "memory_share": 0.95,
    "hidden_share": 1.0,
    "near": 1.0,
    "far": 1.0,
    "product_ratio": 1.2,
}
"""Upper limits of the shares; the other constants have none. Speeds above 95% of the datasheet's
are not believed."""


@dataclass(frozen=True)
class MeasuredRun:
    """A measured speed and the layouts that may have reached it."""

    row: int
    """Number of the row in its table, from 1."""
    label: str
    """The cells that describe the run."""
    quantity: str
    """A key of `QUANTITIES`."""
    measured: float
    rounding: float
    """Largest error of rounding of the measured value."""
    candidates: tuple[Candidate, ...]


class Prediction(NamedTuple):
    """The prediction for a measured run."""

    run: MeasuredRun
    predicted: float
    estimate: Estimate

    @property
    def error(self) -> float:
        """Relative error against the nearest value that rounds to the measured one."""
        low, high = self.run.measured - self.run.rounding, self.run.measured + self.run.rounding
        return self.predicted / min(max(self.predicted, low), high) - 1


class Errors(NamedTuple):
    """Mean and largest absolute error of some predictions."""

    mean: float
    worst: float


def predict(run: MeasuredRun, change: Callable[[Candidate], Candidate] | None = None) -> Prediction:
    """Predict the measured quantity of a run; `change` returns a candidate with other constants."""
    candidates = run.candidates if change is None else map(change, run.candidates)
    estimates = [Estimate(candidate, (), step_time(candidate)) for candidate in candidates]
    fastest = min(
        estimates,
        key=lambda estimated: estimated.time.seconds / estimated.candidate.config.data.global_batch,
    )
    return Prediction(run, QUANTITIES[run.quantity](fastest), fastest)


def errors(predictions: Sequence[Prediction]) -> Errors:
    """Return the errors of some predictions."""
    absolute = [abs(prediction.error) for prediction in predictions]
    return Errors(sum(absolute) / len(absolute), max(absolute))


class Fitted(NamedTuple):
    """The constants of a cluster that were fitted to measured runs."""

    start: dict[str, float]
    """Constants of the cluster file."""
    constants: dict[str, float]
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
    """Fit the constants of the cluster on which all runs were measured."""
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


def fit(
    residuals: Callable[[Constants], Sequence[float]],
    start: Constants,
    largest: Constants | None = None,
) -> dict[str, float]:
    """Return the constants with the smallest sum of squared residuals.

    `residuals` returns the weighted logarithms of predicted over measured. The weights of the
    squared residuals of a table should add up to 1. `largest` has upper limits by name.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ConfigError(
            "--fit",
            "a Python without scipy",
            "scipy, which fits the constants",
            install_command("sweep"),
        ) from error
    limits = largest or {}
    highest = [limits.get(name, math.inf) / value for name, value in start.items()]

    def values(factors: Sequence[float]) -> dict[str, float]:
        return {name: start[name] * factor for name, factor in zip(start, factors, strict=True)}

    def all_residuals(factors: Sequence[float]) -> list[float]:
        prior = [MEAN_ERROR / SPREAD * math.log(factor) for factor in factors]
        return [*residuals(values(factors)), *prior]

    found = least_squares(
        all_residuals,
        [min(1.0, limit) for limit in highest],
        bounds=(SMALLEST_FACTOR, highest),
        diff_step=STEP,
        ftol=LEAST_GAIN,
        max_nfev=ROUNDS,
    )
    return values(found.x.tolist())


def damped(residual: float, weight: float) -> float:
    """Return a residual times the root of its weight, smaller if it exceeds DAMPED_ABOVE.

    Its square is then a pseudo-Huber loss, so that single outliers do not decide the fit.
    """
    scaled = residual / DAMPED_ABOVE
    size = DAMPED_ABOVE * math.sqrt(2 * (math.sqrt(1 + scaled * scaled) - 1))
    return math.copysign(size, residual) * math.sqrt(weight)


def cluster_constants(cluster: ClusterConfig, precision: str) -> dict[str, float]:
    """Return the constants of a cluster; `product_share` only if the peak is known."""
    device, calibration = cluster.device, cluster.device.calibration
    found = {name: float(getattr(calibration, name)) for name in CALIBRATION}
    peak = device.peak_tflops.get(precision)  # type: ignore[call-overload]
    curve = calibration.products.get(precision)  # type: ignore[call-overload]
    if peak and curve:
        found = {"product_share": curve.tflops / peak, **found}
    if len(cluster.links) > 1:
        found["near"] = cluster.links[0].efficiency
    return {**found, "far": cluster.links[-1].efficiency}


def with_constants(candidate: Candidate, constants: Constants) -> Candidate:
    """Return the same layout with other constants of its cluster and of its engine."""
    config = candidate.config
    engine = _changed_engine(config.planner.engine, constants)
    changed = candidate.with_cluster(changed_cluster(config.cluster, constants))
    return replace(changed, config=changed.config.changed("planner", engine=engine))


def changed_cluster(cluster: ClusterConfig, constants: Constants) -> ClusterConfig:
    """Return a cluster with other constants; names that are not given stay."""
    device = cluster.device
    update: dict[str, Any] = {name: constants[name] for name in CALIBRATION if name in constants}
    if "product_share" in constants:
        update["products"] = {
            name: curve.model_copy(
                update={"tflops": constants["product_share"] * device.peak_tflops[name]}
            )
            if name in device.peak_tflops
            else curve
            for name, curve in device.calibration.products.items()
        }
    links = []
    for link in cluster.links:
        name = "far" if link.ranks is None else "near"
        efficiency = constants.get(name, link.efficiency)
        links.append(link.model_copy(update={"efficiency": efficiency}))
    calibration = device.calibration.model_copy(update=update)
    device = device.model_copy(update={"calibration": calibration})
    return cluster.model_copy(update={"device": device, "links": tuple(links)})


def _changed_engine(engine: EngineConfig, constants: Constants) -> EngineConfig:
    host = engine.host.model_copy(
        update={name: constants[name] for name in HOST if name in constants}
    )
    changed = {name: constants[name] for name in PROGRAM if name in constants}
    return engine.model_copy(update={"host": host, **changed})


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
