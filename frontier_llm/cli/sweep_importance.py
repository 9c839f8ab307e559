"""Compute how much each axis of a sweep, and each pair of axes, changes the speed.

A random forest of scikit-learn is fitted to the trials. The library shap divides each of its
predictions into contributions of single axes and of pairs (SHAP interaction values,
arXiv:1802.03888). The predictions are those of settings that are spread evenly over all
combinations of the values, because a search tries good settings more often than others. Both
libraries belong to the extra `sweep` of this package.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.cli.sweep_trials import axes
from frontier_llm.cli.trial import Trial

TREES = 100
MAX_SETTINGS = 400
"""Largest number of settings whose predictions are divided; more would take minutes."""


@dataclass(frozen=True)
class Importance:
    """Mean absolute contributions to the speed, in the unit of the speed, largest first."""

    alone: dict[str, float]
    """The contribution of each axis whatever the values of the other axes."""
    pairs: dict[tuple[str, str], float]
    """The contribution of each pair beyond those of its two axes."""
    settings: int
    """Number of settings whose predictions were divided."""


def is_installed() -> bool:
    """Return whether both libraries are installed."""
    try:
        import shap  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError:
        return False
    return True


def importance(trials: Sequence[Trial]) -> Importance:
    """Return the importance of the axes of a sweep; trials that are not done have the speed 0."""
    import numpy as np
    import shap
    from sklearn.ensemble import RandomForestRegressor

    columns = {key: _numbers(values) for key, values in axes(trials).items()}
    if not columns:
        return Importance({}, {}, 0)
    forest = RandomForestRegressor(TREES, random_state=0)
    forest.fit(np.array(list(columns.values())).T, [trial.speed for trial in trials])
    points = np.array(_settings(columns))
    values = np.asarray(shap.TreeExplainer(forest).shap_interaction_values(points))
    alone = np.abs(np.diagonal(values, axis1=1, axis2=2)).mean(axis=0)
    joint = np.abs(values + values.transpose(0, 2, 1)).mean(axis=0)
    names = list(columns)
    pairs = {
        (names[i], names[j]): float(joint[i, j])
        for i, j in itertools.combinations(range(len(names)), 2)
    }
    return Importance(
        _largest_first(dict(zip(names, alone.tolist(), strict=True))),
        _largest_first(pairs),
        len(points),
    )


def _numbers(values: Sequence[str]) -> list[float]:
    """Return the values of an axis as numbers, or else their places in alphabetical order."""
    try:
        return [float(value) for value in values]
    except ValueError:
        order = sorted(set(values))
        return [float(order.index(value)) for value in values]


def _settings(columns: Mapping[str, Sequence[float]]) -> list[tuple[float, ...]]:
    """Return all combinations of the values, or MAX_SETTINGS of them chosen at random."""
    values = [sorted(set(column)) for column in columns.values()]
    if math.prod(map(len, values)) <= MAX_SETTINGS:
        return list(itertools.product(*values))
    import numpy as np

    generator = np.random.default_rng(0)
    drawn = [generator.choice(column, MAX_SETTINGS).tolist() for column in values]
    return list(zip(*drawn, strict=True))


def _largest_first(values: Mapping[Any, float]) -> dict[Any, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
