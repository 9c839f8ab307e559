"""Parameters of which some run only with `--exhaustive`: combinations that the others cover."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive(*values: tuple[Any, ...]) -> list[Any]:
    """Return sets of parameters of a test that all have the marker `exhaustive`."""
    return [pytest.param(*value, marks=pytest.mark.exhaustive) for value in values]


def covering(values: Iterable[Any], exhaustive: Collection[Any]) -> list[Any]:
    """Return the values as parameters of a test; those in `exhaustive` have that marker."""
    values = list(values)
    unknown = [value for value in exhaustive if value not in values]
    assert not unknown, unknown
    return [
        pytest.param(value, marks=pytest.mark.exhaustive) if value in exhaustive else value
        for value in values
    ]
