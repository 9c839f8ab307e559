"""The importance of axes and of pairs, on speeds that are known functions of the settings."""

import itertools
import sys

import pytest

from frontier_llm.cli.sweep_importance import MAX_SETTINGS, importance, is_installed
from frontier_llm.cli.trial import Trial


def _trials(speed, repeat=1):
    """Return the trials of a grid of three axes with the speed of a function of their values."""
    grid = itertools.product((1, 2, 4, 8), ("zero1", "zero2", "zero3"), (16, 32))
    return [
        Trial(
            [f"parallel.tensor={t}", f"sharding={z}", f"launch.nodes={n}", "sweep=x"],
            "done", "", 1.0, float(speed(t, z, n)), 1, None, None,
        )
        for t, z, n in list(grid) * repeat
    ]  # fmt: skip


def test_the_axis_that_decides_comes_first():
    found = importance(_trials(lambda t, z, n: 1000 * t + 10 * (z == "zero3")))
    assert next(iter(found.alone)) == "parallel.tensor"
    assert found.alone["parallel.tensor"] > 20 * found.alone["sharding"]
    assert found.alone["sharding"] > found.alone["launch.nodes"]
    assert found.settings == 24


def test_a_pair_that_only_acts_jointly_comes_first():
    found = importance(_trials(lambda t, z, n: 100 * ((t > 2) == (n == 16)), repeat=3))
    pair, size = next(iter(found.pairs.items()))
    assert set(pair) == {"parallel.tensor", "launch.nodes"}
    assert size > 5 * max(found.alone.values())
    assert set(found.pairs) == set(itertools.combinations(sorted(found.alone), 2))


def test_contributions_have_the_unit_of_the_speed():
    slow = importance(_trials(lambda t, z, n: t))
    fast = importance(_trials(lambda t, z, n: 1000 * t))
    assert fast.alone["parallel.tensor"] == pytest.approx(1000 * slow.alone["parallel.tensor"])


def test_many_settings_are_sampled():
    values = itertools.product(range(10), range(10), range(5))
    trials = [
        Trial([f"a={a}", f"b={b}", f"c={c}"], "done", "", 1.0, float(a), 1, None, None)
        for a, b, c in values
    ]
    found = importance(trials)
    assert found.settings == MAX_SETTINGS
    assert found.alone["a"] > 100 * found.alone["b"]


def test_trials_without_axes_have_no_importance():
    assert importance([Trial(["a=1"], "done", "", 1.0, 1.0, 1, None, None)]).alone == {}


def test_an_absent_library_is_noticed(monkeypatch):
    assert is_installed()
    monkeypatch.setitem(sys.modules, "shap", None)
    assert not is_installed()
