"""Fit constants of a cluster file to published figures, by a deterministic search.

The search minimises the sum of squared logarithms of predicted over printed figures. It changes one
constant at a time, by smaller and smaller factors. A weak pull towards the starting values decides
constants that the figures leave open.
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
"""Orders of magnitude from the literature: large products at 75% of the peak, streams at 80% of the
memory's bandwidth, collectives at 60% of the links'."""
LARGEST: Constants = {
    "tflops": 0.95,
    "attention_share": 1.0,
    "memory_share": 0.9,
    "hidden_share": 1.0,
    "near": 1.0,
    "far": 1.0,
}
FACTORS = (1.5, 1.2, 1.08, 1.03, 1.01)
PULL = 0.01
"""Weight of the squared distance to the starting point, relative to a row's squared error."""
ROUNDS = 6


def fit(rows: Sequence[Row], free: Sequence[str], start: Constants = STARTING_POINT) -> Constants:
    """Fit some constants to figures, and leave the others as they are.

    Args:
        rows: the figures that count.
        free: names of the constants to change.
        start: starting values, towards which the fit is pulled.
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
    pulled = sum(math.log(constants[name] / start[name]) ** 2 for name in start)
    return PULL * pulled + sum(_squared(row, constants) for row in rows)


def _squared(row: Row, constants: Constants) -> float:
    """Return the squared error beyond rounding."""
    return math.log(1 + predict(row, constants).error_beyond_rounding) ** 2
