"""Fit constants of a cluster file to published training speeds, by a deterministic search.

The search minimises the sum of log(predicted / published) ** 2 over the published values. It
changes one constant at a time, by smaller and smaller factors. Some constants hardly affect any
prediction. A small penalty for the distance from the starting values keeps them there.
"""

import math
from collections.abc import Sequence

from benchmarks.published.predict import Constants, predict
from benchmarks.published.published import Row

STARTING_POINT: Constants = {
    "tflops": 0.75,
    "half_size": 100.0,
    "attention_share": 0.75,
    "memory_share": 0.8,
    "hidden_share": 0.7,
    "near": 0.6,
    "far": 0.6,
}
"""Orders of magnitude from the literature: large matrix products reach 75% of the peak FLOP/s,
memory streams reach 80% of the memory's bandwidth, and collectives reach 60% of the bandwidth of
the links inside a node (near) and between nodes (far). `half_size` is the constant c of a matrix
product in docs/planner.md: a product of square matrices with 3c rows has half of this speed."""
LARGEST: Constants = {
    "tflops": 0.95,
    "attention_share": 1.0,
    "memory_share": 0.9,
    "hidden_share": 1.0,
    "near": 1.0,
    "far": 1.0,
}
"""Upper limits of the constants."""
FACTORS = (1.5, 1.2, 1.08, 1.03, 1.01)
"""Factors by which constants are changed, one after the other."""
PENALTY = 0.01
"""Weight of the squared distance from the starting point, relative to a row's squared error."""
ROUNDS = 6
"""Maximum number of rounds over all constants per factor."""


def fit(rows: Sequence[Row], free: Sequence[str], start: Constants = STARTING_POINT) -> Constants:
    """Fit some constants to published values; return all constants.

    Args:
        rows: the published values.
        free: names of the constants to change; the others keep their starting values.
        start: starting values of all constants.
    """
    best, loss = dict(start), _loss(rows, start, start)
    for factor in FACTORS:
        for _ in range(ROUNDS):
            before = loss
            for name in free:
                for step in (factor, 1 / factor):
                    tried = {**best, name: min(best[name] * step, LARGEST.get(name, math.inf))}
                    if (tried_loss := _loss(rows, tried, start)) < loss:
                        best, loss = tried, tried_loss
            if loss == before:
                break
    return best


def _loss(rows: Sequence[Row], constants: Constants, start: Constants) -> float:
    distance = sum(math.log(constants[name] / start[name]) ** 2 for name in start)
    return PENALTY * distance + sum(_squared_error(row, constants) for row in rows)


def _squared_error(row: Row, constants: Constants) -> float:
    """Return the squared logarithm of predicted over published, without the error of rounding."""
    return math.log(1 + predict(row, constants).error_beyond_rounding) ** 2
