"""Every behaviour of the table trains as in one process, however states are sharded."""

import functools

import pytest

from tests.engine.loops import BEHAVIOURS
from tests.engine.reference import (
    RANKS,
    Trained,
    differences,
    in_one_process,
    outcome,
)
from tests.ranks import in_turn, run_ranks

pytestmark = pytest.mark.slow


@functools.cache
def reference(name: str) -> Trained:
    return in_one_process(BEHAVIOURS[name])


@functools.cache
def outcomes(params: int) -> dict[str, list[Trained | str]]:
    """Return what each rank trained, or its error, of all behaviours."""
    cases = {name: (behaviour, params) for name, behaviour in BEHAVIOURS.items()}
    return on_one_start(outcome, cases)


@pytest.mark.parametrize("name", BEHAVIOURS)
@pytest.mark.parametrize("params", [1, 2, 4])
def test_behaviours(params: int, name: str) -> None:
    behaviour = BEHAVIOURS[name]
    for got in outcomes(params)[name]:
        if behaviour.refused and params > 1:
            assert isinstance(got, str)
            assert behaviour.refused in got
        else:
            assert isinstance(got, Trained), got
            assert differences(behaviour, got, reference(name)) == {}
