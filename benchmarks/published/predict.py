"""Predict a published training speed with the planner."""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from benchmarks.published.published import TUNED, Row
from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate
from frontier_llm.planner.layout_time import LayoutTime
from frontier_llm.planner.step_time import step_time

Constants = dict[str, float]
"""Constants of a device and its links, by name.

`tflops` is the speed of large matrix products as a share of the peak. `near` and `far` are the
efficiencies of the links inside a node and between nodes. frontier_llm/config/calibration.py
explains `half_size`, `attention_share`, `memory_share` and `hidden_share`."""
CHUNKS = (1, 2, 4)
"""Numbers of model chunks per stage that are tried if a paper does not give the number."""
MICRO_BATCHES = (1, 2, 4, 8)
"""Samples per micro-batch that are tried if a paper does not give the number."""


@dataclass(frozen=True)
class Prediction:
    """A published value and its prediction."""

    row: Row
    predicted: float
    """The predicted value of the quantity `row.quantity`."""
    estimate: Estimate
    """The estimate that the value is taken from."""

    @property
    def error(self) -> float:
        """Relative error of the prediction against the published value."""
        return self.predicted / self.row.published - 1

    @property
    def error_beyond_rounding(self) -> float:
        """Relative error against the nearest value that rounds to the published value."""
        low = self.row.published - self.row.rounding
        high = self.row.published + self.row.rounding
        return self.predicted / min(max(self.predicted, low), high) - 1


def predict(row: Row, constants: Constants | None = None) -> Prediction:
    """Predict a published value; if the set-up is open, the fastest one is predicted.

    Args:
        row: the published value.
        constants: constants to use instead of those of the cluster file.
    """
    estimates = [_estimate(candidate, row, constants) for candidate in _candidates(row)]
    best = max(estimates, key=lambda estimate: _quantity(estimate, row))
    return Prediction(row, _quantity(best, row), best)


def constants_of(config: RunConfig) -> Constants:
    """Read the constants of a cluster file."""
    device, links = config.cluster.device, config.cluster.links
    calibration = device.calibration
    curve = calibration.products["bf16"]
    return {
        "tflops": curve.tflops / device.peak_tflops["bf16"],
        "half_size": curve.half_size,
        "attention_share": calibration.attention_share,
        "memory_share": calibration.memory_share,
        "hidden_share": calibration.hidden_share,
        "near": links[0].efficiency,
        "far": links[-1].efficiency,
    }


def with_constants(cluster: ClusterConfig, constants: Constants) -> ClusterConfig:
    """Return the cluster with these constants instead of its own."""
    device = cluster.device
    curves = {
        name: curve.model_copy(
            update={
                "tflops": constants["tflops"] * device.peak_tflops[name],
                "half_size": constants["half_size"],
            }
        )
        for name, curve in device.calibration.products.items()
    }
    shares = ("attention_share", "memory_share", "hidden_share")
    update: dict[str, Any] = {name: constants[name] for name in shares}
    calibration = device.calibration.model_copy(update={**update, "products": curves})
    links = tuple(
        link.model_copy(update={"efficiency": constants["far" if link.ranks is None else "near"]})
        for link in cluster.links
    )
    device = device.model_copy(update={"calibration": calibration})
    return cluster.model_copy(update={"device": device, "links": links})


@cache
def composed(overrides: tuple[str, ...]) -> RunConfig:
    """Compose the first override, an experiment, and set the keys of the others to their values."""
    values = deepcopy(_experiment(overrides[0]))
    for override in overrides[1:]:
        key, _, value = override.partition("=")
        *path, last = key.split(".")
        section = values
        for part in path:
            section = section[part]
        section[last] = yaml.safe_load(value)
    return decode(values)


@cache
def _experiment(override: str) -> dict[str, Any]:
    return compose([override])


@cache
def _candidates(row: Row) -> tuple[Candidate, ...]:
    """Return the layout of a row, or every layout to try if its reading is TUNED."""
    config = composed(row.overrides)
    ranks_per_node = config.cluster.ranks_per_node
    if row.reading != TUNED:
        return (Candidate.of(config, row.ranks, ranks_per_node),)
    found = []
    for micro_batch in MICRO_BATCHES:
        for chunks in CHUNKS:
            data = config.data.model_copy(update={"micro_batch": micro_batch})
            parallel = config.parallel.model_copy(update={"chunks": chunks})
            changed = config.model_copy(update={"data": data, "parallel": parallel})
            try:
                found.append(Candidate.of(changed, row.ranks, ranks_per_node))
            except ConfigError:  # the numbers do not divide the batch or the layers
                continue
    return tuple(found)


def _estimate(candidate: Candidate, row: Row, constants: Constants | None) -> Estimate:
    if constants is not None:
        candidate = candidate.with_cluster(with_constants(candidate.config.cluster, constants))
    layout = LayoutTime(candidate, row.engine)
    return Estimate(candidate, (), step_time(candidate, layout))


def _quantity(estimate: Estimate, row: Row) -> float:
    """Return the predicted value of the quantity that the row's paper publishes."""
    value: float = getattr(estimate, row.quantity)
    return value
