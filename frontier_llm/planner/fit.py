"""Fit positive constants to measurements by least squares (Levenberg and Marquardt).

The logarithms of the constants are fitted. The residual of a measurement is the logarithm of
predicted over measured, damped beyond 10% so that single slow runs do not decide a constant. Each
constant is drawn towards its starting value: a change by a factor of e^`SPREAD` counts as much as
a mean error of 1% in a table. Equal inputs give equal results.
"""

import math
from collections.abc import Callable, Mapping, Sequence

SPREAD = 0.2
"""Expected error of the logarithm of a starting value."""
MEAN_ERROR = 0.01
"""Mean relative error of a table that weighs as much as a change of one constant by SPREAD."""
DAMPED_ABOVE = 0.1
"""Residuals grow in proportion up to about this size, and more slowly beyond it."""
STEP = 0.02
"""Change of the logarithm of a constant from which derivatives are computed."""
LONGEST_STEP = 0.5
ROUNDS = 12
LEAST_GAIN = 0.002
"""The fit ends if a round reduces the sum of squares by less than this share."""
Residuals = Callable[[Mapping[str, float]], Sequence[float]]
"""Returns the weighted logarithms of predicted over measured for some constants."""


def fit(
    residuals: Residuals, start: Mapping[str, float], largest: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the constants with the smallest sum of squares.

    Args:
        residuals: the weights of the squared residuals of a table should add up to 1.
        start: starting values of the constants to fit.
        largest: upper limits by name.
    """
    names, limits = list(start), largest or {}
    origin = [math.log(start[name]) for name in names]
    highest = [math.log(limits[name]) if name in limits else math.inf for name in names]

    def values(logs: Sequence[float]) -> dict[str, float]:
        return {name: math.exp(log) for name, log in zip(names, logs, strict=True)}

    def all_residuals(logs: Sequence[float]) -> list[float]:
        prior = [MEAN_ERROR / SPREAD * (log - at) for log, at in zip(logs, origin, strict=True)]
        return [*residuals(values(logs)), *prior]

    logs = list(origin)
    current = all_residuals(logs)
    caution = 0.01
    for _ in range(ROUNDS):
        columns = []
        for index in range(len(names)):
            moved = [log + STEP * (i == index) for i, log in enumerate(logs)]
            ahead = all_residuals(moved)
            columns.append([(a - b) / STEP for a, b in zip(ahead, current, strict=True)])
        before = _squares(current)
        for _ in range(4):
            step = _step(columns, current, caution)
            tried = [min(log + s, high) for log, s, high in zip(logs, step, highest, strict=True)]
            found = all_residuals(tried)
            if _squares(found) < before:
                logs, current, caution = tried, found, caution / 4
                break
            caution *= 5
        if _squares(current) > (1 - LEAST_GAIN) * before:
            break
    return values(logs)


def damped(residual: float, weight: float) -> float:
    """Return a residual times the root of its weight, smaller if it exceeds DAMPED_ABOVE.

    Its square is then a pseudo-Huber loss, so that single outliers do not decide the fit.
    """
    scaled = residual / DAMPED_ABOVE
    size = DAMPED_ABOVE * math.sqrt(2 * (math.sqrt(1 + scaled * scaled) - 1))
    return math.copysign(size, residual) * math.sqrt(weight)


def _squares(residuals: Sequence[float]) -> float:
    return sum(residual * residual for residual in residuals)


def _step(
    columns: Sequence[Sequence[float]], residuals: Sequence[float], caution: float
) -> list[float]:
    """Solve the normal equations of one round, with a larger diagonal for shorter steps."""
    matrix = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in columns] for x in columns]
    for index, row in enumerate(matrix):
        row[index] *= 1 + caution
    right = [-sum(a * b for a, b in zip(x, residuals, strict=True)) for x in columns]
    return [max(-LONGEST_STEP, min(LONGEST_STEP, s)) for s in _solve(matrix, right)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a system of linear equations with a positive definite matrix (elimination)."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            share = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [b - share * p for b, p in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][j] * solution[j] for j in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
