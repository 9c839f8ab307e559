"""Factors chosen for a device: the smallest that fit, inside a node first."""

import pytest

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.layout import make_grid, resolve_factors
from frontier_llm.geometry.partition import Factors
from tools.compose import compose


def chosen(*overrides: str, ranks: int = 64, per_node: int = 8) -> Factors:
    base = ("sharding=amsp", "cluster=a800_amsp", "parallel.pipeline=1")
    config = RunConfig.model_validate(compose([*base, *overrides]))
    return resolve_factors(config, make_grid(config, ranks, per_node))


def test_small_models_are_not_cut() -> None:
    assert chosen("model=gpt_125m") == Factors(1, 1, 1, 64)


def test_optimizer_states_are_cut_first_and_inside_the_node() -> None:
    assert chosen("model=llama_7b") == Factors(1, 1, 8, 64)  # AMSP's own choice for it


def test_larger_models_are_cut_further_and_leave_the_node_last() -> None:
    thirteen, thirty = chosen("model=llama_13b"), chosen("model=llama_30b")
    assert thirteen.optimizer == 8
    assert thirteen.grads > 1
    assert thirty.params <= 8
    assert thirty.grads <= 8
    assert thirty.optimizer > 8


def test_pipeline_and_tensor_leave_less_to_cut() -> None:
    assert chosen("model=llama_13b", "parallel.tensor=8") == Factors(1, 1, 1, 8)


def test_what_never_fits_says_how_much_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"at least .* [TG]iB"):
        chosen("model=gpt_1t", ranks=8)


def test_auto_is_for_all_or_none() -> None:
    with pytest.raises(ConfigError, match="use sharding=amsp"):
        chosen("sharding.params=1", "sharding.grads=1")
    with pytest.raises(ConfigError, match="use sharding=amsp"):
        chosen("sharding.grads=1")
