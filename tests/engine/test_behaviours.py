"""Every behaviour of the table trains as in one process, however states are sharded."""

import functools
from typing import Any

import pytest

from tests.covering import covering
from tests.engine.loops import BEHAVIOURS
from tests.engine.reference import Trained, differences, in_one_process, on_one_start, outcome

pytestmark = pytest.mark.slow

CASES = [(name, params) for name in BEHAVIOURS for params in (1, 2, 4)]
COVERED = (
    "compiled layers", "compiled afterwards", "output: list", "output: named tuple",
    "output: nested", "frozen outside layers", "a frozen layer", "only biases train", "sequential",
    "error in backward", "uneven widths", "recomputed inside layers", "strong clipping",
)  # fmt: skip
"""Behaviours that others have in part, which do not always run."""
USUAL = [
    *((name, (2, 1, 2, 4)[place % 4]) for place, name in enumerate(BEHAVIOURS)
      if name not in COVERED),
    *((name, params) for name, behaviour in BEHAVIOURS.items() if behaviour.refused
      for params in (1, behaviour.together, behaviour.together // 2)),
]  # fmt: skip
"""The cases that always run."""


@functools.cache
def reference(name: str) -> Trained:
    return in_one_process(BEHAVIOURS[name])


@functools.cache
def outcomes(is_usual: bool) -> dict[Any, tuple[Trained | str, ...]]:
    """Return what each rank trained, or its error, in the cases that always run, or in others."""
    cases: dict[Any, tuple[Any, ...]] = {
        case: (BEHAVIOURS[case[0]], case[1]) for case in CASES if (case in USUAL) == is_usual
    }
    return on_one_start(outcome, cases)


@pytest.mark.parametrize(
    "case", covering(CASES, [case for case in CASES if case not in USUAL]), ids=str
)
def test_behaviours(case: tuple[str, int]) -> None:
    name, params = case
    behaviour = BEHAVIOURS[name]
    for got in outcomes(case in USUAL)[case]:
        if behaviour.refused and params >= behaviour.together:
            assert isinstance(got, str)
            assert behaviour.refused in got
        else:
            assert isinstance(got, Trained), got
            assert differences(behaviour, got, reference(name)) == {}
