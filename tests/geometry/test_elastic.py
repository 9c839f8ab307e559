"""The same run on another number of ranks: what may change, and what must not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.elastic import fitting_ranks, refit
from frontier_llm.geometry.resolved import ResolvedLayout
from tests.values import tiny_values

BASE = tiny_values(
    "data.global_batch=24", "data.micro_batch=3", "parallel.tensor=2", "launch.ranks=4"
)


def _with(**changes):
    values = {**BASE, "data": dict(BASE["data"]), "sharding": dict(BASE["sharding"])}
    values["parallel"] = dict(BASE["parallel"])
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
    return values


def _refit(values, ranks):
    config = decode(values)
    return refit(config.parallel, config.data, config.sharding, ranks)


def test_what_fits_is_left_alone():
    assert _refit(BASE, 4) == {}


@given(
    replicas=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    micro_batch=st.integers(1, 24),
    factors=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 3),
)
def test_the_fitted_configuration_runs_with_the_same_global_batch(replicas, micro_batch, factors):
    sharding = dict(zip(("params", "grads", "optimizer"), sorted(factors), strict=True))
    values = _with(
        data__micro_batch=micro_batch, **{f"sharding__{n}": v for n, v in sharding.items()}
    )
    for key, value in _refit(values, 2 * replicas).items():
        section, name = key.split(".")
        values[section][name] = value
    config = decode(values)
    layout = ResolvedLayout.resolve(config, 2 * replicas, 2 * replicas)
    assert layout.micro_batches * layout.micro_batch * replicas == 24
    assert config.data.global_batch == 24
    assert config.data.micro_batch <= micro_batch


def test_replicas_that_cannot_share_the_batch_are_refused_with_those_that_can():
    with pytest.raises(ConfigError, match="2, 4, 6, 8, 12, 16, 24, 48 ranks") as caught:
        _refit(BASE, 10)
    assert caught.value.key == "launch.elastic"


def test_context_ranks_share_samples_and_divide_states():
    values = _with(parallel__context=2, sharding__optimizer=8)
    assert _refit(values, 8) == {"sharding.optimizer": 4}, "of 4 data ranks"
    assert _refit(values, 6) == {}, "a part of a replica"
    config = decode(values)
    assert fitting_ranks(config.parallel, config.data, 15) == 12, "3 replicas of 4 ranks"
    wide = _with(parallel__context=2, data__micro_batch=5)
    assert _refit(wide, 24)["data.micro_batch"] == 4, "24 samples on 6 replicas of 4 ranks"
