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


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters of a test, of which only each n-th always runs.

    For values that the same code treats alike, such as files of one group.
    """
    return [
        pytest.param(value, marks=pytest.mark.exhaustive) if place % count else value
        for place, value in enumerate(values)
    ]
