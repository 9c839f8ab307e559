"""Values of settings that would have no effect, or a wrong one, are errors that name them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from frontier_llm.engine.shard_settings import RateFactors
from frontier_llm.errors import ConfigError
from frontier_llm.launch.world import World
from frontier_llm.library import AdamW, Checkpoints, Formats, ParameterGroup, shard
from tests.ranks import run_ranks

NAN = float("nan")
ONE = nn.Linear(2, 2)


def group(**given: Any) -> ParameterGroup:
    return ParameterGroup([ONE.weight], **given)


WRONG: dict[Callable[..., Any], dict[str, tuple[Any, ...]]] = {
    AdamW: {
        "beta1": (-0.1, 1.0, NAN, True, "0.9"),
        "beta2": (1.0, NAN),
        "epsilon": (0.0, -1e-8, NAN, None),
        "weight_decay": (-0.1, NAN, True, None),
        "clip_norm": (0.0, -1.0, True, "1", float("inf")),
        "decayed": (("matrix",), "matrices", ("head",)),
    },
    Formats: {
        "params": ("int9", None, ""),
        "refresh": ("fp8",),
        "grads": ("INT8", None),
        "grads_across": ("", "int2"),
        "sums": ("fp64",),
        "block_elements": (0, -32, 7, 16384, True, 64.5, NAN),
        "keep_errors": (True,),
    },
    group: {"rate_factor": (-1.0, NAN, True, "2"), "weight_decay": (-1.0, NAN, False)},
}
CASES = [
    *((make, {key: value}) for make, keys in WRONG.items() for key in keys for value in keys[key]),
    (lambda **given: AdamW(rate_factors=RateFactors(**given)), {"norms": -1.0}),
]


@pytest.mark.parametrize(("make", "given"), CASES, ids=[str(given) for _, given in CASES])
def test_settings_are_refused(make: Callable[..., Any], given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**given)
    assert [caught.value.key] == list(given)


@pytest.mark.parametrize("given", [{"name": "muon"}, {"momentum": 0.9}])
def test_adamw_has_no_other_rule(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        AdamW(**given)


def test_errors_are_kept_of_integers_between_nodes() -> None:
    assert Formats(grads="int8", keep_errors=True).feedback() is not None
    assert Formats(sums="int4", keep_errors=True).feedback() is not None
    for given in ({"grads": "bf16"}, {"grads": "int8", "grads_across": "bf16"}):
        with pytest.raises(ConfigError, match="grads_across"):
            Formats(keep_errors=True, **given)  # type: ignore[arg-type]


def test_a_generator_of_parameters_can_be_used_once() -> None:
    parameters = ONE.parameters()
    made = ParameterGroup(parameters)
    assert list(made.params) == list(made.params) == list(ONE.parameters())
    with pytest.raises(ConfigError, match="empty after one use"):
        ParameterGroup(parameters)


def refused_groups(world: World) -> None:
    module, other = nn.Linear(3, 3), nn.Linear(5, 3)
    first, second = (ParameterGroup(module.parameters()) for _ in range(2))
    mistakes: list[tuple[ParameterGroup, str]] = [
        (ParameterGroup(other.parameters()), "Parameter, not of the module"),
        (second, "got:    weight"),
        (ParameterGroup(module.named_parameters()), "tuple, not of the module"),  # type: ignore[arg-type]
    ]
    for mistake, text in mistakes:
        with pytest.raises(ConfigError) as caught:
            shard(module, update=AdamW(groups=[first, mistake]))
        assert text in str(caught.value)
        assert caught.value.key == "groups[1].params"
    shard(module, update=AdamW(groups=iter([first])))  # type: ignore[arg-type]


def refused_arguments(world: World, folder: Path) -> None:
    for key, values in {
        "params": (0, True, 1.0),
        "grads": (0, True),
        "optimizer": (0, -1),
        "micro_batches": (0, -1, 1.5, True),
        "ranks_per_node": (0, -1, True),
    }.items():
        for value in values:
            with pytest.raises(ConfigError) as caught:
                shard(nn.Linear(2, 2), **{key: value})  # type: ignore[arg-type]
            assert key in caught.value.key
    states = shard(nn.Linear(2, 2))
    for key, values in {
        "every": (0, -3, 1.5, True),
        "keep": (0, -1, True),
        "mode": ("lasy", None),
        "timeout_seconds": (0, -1, NAN, float("inf"), True, "600"),
    }.items():
        for value in values:
            with pytest.raises(ConfigError) as caught:
                Checkpoints(folder, states, **{key: value})  # type: ignore[arg-type]
            assert caught.value.key == key
    with pytest.raises(ConfigError, match="learning rate"):
        states.step(True)


def unscaled(world: World) -> None:
    """A factor of 0 keeps parameters as they are."""
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()
    states = shard(module, update=AdamW(groups=[ParameterGroup([module.weight], 0.0)]))
    states.backward(module(before).square().mean())
    states.step(0.1)
    assert module.weight.equal(before)


def test_groups_of_other_parameters_are_refused() -> None:
    run_ranks(refused_groups, 1)


def test_arguments_without_effect_are_refused(tmp_path: Path) -> None:
    run_ranks(refused_arguments, 1, tmp_path)


def test_a_rate_factor_of_zero_trains_nothing() -> None:
    run_ranks(unscaled, 1)
