"""A configuration resolved to integers; `auto` chooses the smallest factors that fit a device."""

import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.partition import Factors
from frontier_llm.geometry.resolved import ResolvedLayout

BATCH = ("data.global_batch=64", "data.micro_batch=1")


def chosen(*overrides: str, ranks: int = 64, per_node: int = 8) -> Factors:
    base = ("sharding=amsp", "cluster=a800_amsp", "parallel.pipeline=1", *BATCH)
    config = RunConfig.model_validate(compose([*base, *overrides]))
    return ResolvedLayout.resolve(config, ranks, per_node).factors


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


def test_a_layout_holds_the_integers_of_its_configuration() -> None:
    overrides = ("parallel.tensor=2", "parallel.pipeline=4", "parallel.chunks=2", "precision=auto")
    config = RunConfig.model_validate(
        compose(["model=gpt_125m", "sharding=zero1", *overrides, *BATCH])
    )
    layout = ResolvedLayout.resolve(config, 32, 8)
    assert layout.grid == Grid(tensor=2, data=4, pipeline=4, ranks_per_node=8)
    assert layout.factors == Factors(1, 1, 4, 4)
    assert (layout.micro_batches, layout.compute_bytes, layout.nodes_per_copy) == (16, 2, 4)
    assert [chunk.stage for chunk in layout.model_chunks] == [0, 1, 2, 3] * 2
    measured = ResolvedLayout.resolve(config, 32, 8, precision="fp32", ignore_sharding=True)
    assert (measured.compute_bytes, measured.factors) == (4, Factors(1, 1, 1, 4))
    assert measured.with_factors(layout.factors).factors == layout.factors


def test_a_layout_that_breaks_a_rule_is_refused_unless_rules_are_not_checked() -> None:
    config = RunConfig.model_validate(compose(["model=gpt_125m", "data.global_batch=7"]))
    with pytest.raises(ConfigError, match="global_batch"):
        ResolvedLayout.resolve(config, 8, 8)
    assert ResolvedLayout.resolve(config, 8, 8, check_rules=False).grid.size == 8
