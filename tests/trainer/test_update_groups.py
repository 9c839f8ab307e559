"""Weight decay and learning rates by group of parameters, in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.launch.world import World
from tests.covering import covering, exhaustive
from tests.forked_train import TINY, train
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.trainer.test_parity import BATCH, LAYOUTS, MODELS, compare, reference
from tests.trainer.test_rate_schedules import learned
from tests.values import TINY_T5, tiny_values

pytestmark = pytest.mark.slow

UNTIED = ["model.tied=false"]
FACTORS = {"embedding": 3.0, "matrices": 0.25, "head": 0.5, "norms": 2.0}
GROUPS = [f"optimizer.rate_factors.{group}={factor}" for group, factor in FACTORS.items()]
DECAY = "optimizer.weight_decay=0.5"


def group_of(name: str) -> str:
    """Return the group of a parameter from its global name."""
    if name.endswith(".bias") or "norm" in name:
        return "norms"
    if name.startswith(("embedding.", "encoder_positions.", "decoder_positions.")):
        return "embedding"
    return "head" if name.startswith("head.") else "matrices"


def masters(rig: Rig) -> dict[str, torch.Tensor]:
    """Return copies of the master weights of a single rank, by name."""
    rig.states.settle()
    return {shard.record.name: shard.master.clone() for shard in rig.states.shards()}


def differences(world: World, values: dict[str, Any], decayed: list[str]) -> dict[str, float]:
    """Return for each parameter the largest difference from torch's AdamW after three steps."""
    rig = make_rig(world, values)
    settings = rig.config.optimizer
    parameters = {name: torch.nn.Parameter(master) for name, master in masters(rig).items()}
    groups = [
        {
            "params": [parameter],
            "lr": settings.learning_rate * FACTORS[group_of(name)],
            "weight_decay": settings.weight_decay if group_of(name) in decayed else 0.0,
        }
        for name, parameter in parameters.items()
    ]
    adamw = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon)
    for step in range(3):
        rig.step.run(step + 1, rig.batches(step), settings.learning_rate)
        for record, _, gradient in rig.states.gradients():
            parameters[record.name].grad = gradient.clone()
        adamw.step()
    found = masters(rig)
    return {
        name: (found[name] - parameter).abs().max().item() for name, parameter in parameters.items()
    }


@pytest.mark.parametrize(
    "decayed",
    [["embedding", "matrices", "head"], ["matrices"], ["norms", "head"], [], list(FACTORS)],
    ids="-".join,
)
@pytest.mark.parametrize(
    "model", covering(["untied_gqa_swiglu", "t5", "tied_gelu"], ["t5", "tied_gelu"])
)
def test_updates_are_those_of_torch_with_parameter_groups(model: str, decayed: list[str]) -> None:
    overrides = TINY_T5 if model == "t5" else MODELS[model]
    chosen = [group for group in GROUPS if model != "tied_gelu" or ".head=" not in group]
    values = tiny_values(*overrides, *BATCH, *chosen, DECAY)
    values["optimizer"]["decayed"] = decayed
    (found,) = run_ranks(differences, 1, values, decayed)
    assert {group_of(name) for name in found} == set(FACTORS) - (
        {"head"} if model == "tied_gelu" else set()
    )
    assert max(found.values()) < 2e-7, found


@pytest.mark.parametrize("sharding", covering(["zero1", "zero3"], ["zero1"]))
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *exhaustive(("tensor2_sequence", "untied_gqa_swiglu")),
        ("tensor2_pipeline2_data2", "tied_gelu"),
        ("pipeline2_chunks2", "untied_gqa_swiglu"),
        ("data2", "untied_gqa_swiglu"),
    ],
)
def test_layout_equals_one_process(layout: str, model: str, sharding: str) -> None:
    """Losses of later steps depend on the updates."""
    size, overrides = LAYOUTS[layout]
    chosen = [group for group in GROUPS if model != "tied_gelu" or ".head=" not in group]
    groups = [*MODELS[model], *chosen, DECAY, "optimizer.decayed=[matrices, norms]"]
    compare(size, [*overrides, *BATCH, f"sharding={sharding}"], groups)
    plain = reference((*MODELS[model], *BATCH), 3)[0]
    assert not np.allclose(plain, reference((*groups, *BATCH), 3)[0], rtol=1e-5)


def layouts(world: World, values: dict[str, Any]) -> list[Any]:
    rig = make_rig(world, values, "bf16")
    assert all(result.loss < 5 for result in rig.train(2))
    return [(unit.name, unit.layout) for unit in rig.states.all_units]


def test_the_layout_of_units_does_not_depend_on_the_groups() -> None:
    """Quantised messages end where the matrices end, whatever is decayed."""
    quantised = ["sharding=zeropp", "collectives=zeropp", "precision=bf16", *UNTIED]
    groups = ((), (*GROUPS, "optimizer.decayed=[norms]"))
    cases = [(tiny_values(*quantised, *chosen),) for chosen in groups]
    for plain, grouped in run_ranks(in_turn, 4, layouts, cases, ranks_per_node=2):
        assert grouped == plain


def frozen(world: World, values: dict[str, Any]) -> set[str]:
    """Return the groups of which a master weight has changed."""
    rig = make_rig(world, values)
    before = masters(rig)
    rig.train(2)
    after = masters(rig)
    return {group_of(name) for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("group", FACTORS)
def test_a_factor_of_zero_freezes_a_group(group: str) -> None:
    values = tiny_values(*UNTIED, *BATCH, f"optimizer.rate_factors.{group}=0.0")
    assert run_ranks(frozen, 1, values) == [set(FACTORS) - {group}]


def test_groups_are_set_on_the_command_line() -> None:
    chosen = ["optimizer.decayed=[matrices,norms]", "optimizer.rate_factors.embedding=0.1"]
    for optimizer in ("adamw", "adamw_tiny"):
        config = decode(compose([f"optimizer={optimizer}", *chosen]))
        assert config.optimizer.decayed == ("matrices", "norms")
        assert config.optimizer.rate_factors.model_dump() == {
            "embedding": 0.1, "matrices": 1.0, "head": 1.0, "norms": 1.0,
        }  # fmt: skip


@pytest.mark.exhaustive
def test_a_resumed_run_is_one_that_never_stopped(tmp_path: Path) -> None:
    """The number of updates is restored for every group, in another layout too."""
    text = Path(__file__).parents[2] / "frontier_llm" / "cli" / "train.py"
    (tmp_path / "text.txt").write_text(text.read_text() * 20)
    chosen = [
        *TINY, f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared", *UNTIED,
        *GROUPS, "optimizer.decayed=[norms]", "optimizer.warmup_steps=2", "optimizer.decay_steps=6",
        "sharding=zero1", "parallel.pipeline=1",
    ]  # fmt: skip
    whole = train(*chosen, f"run.dir={tmp_path}/whole", "trainer.steps=6")
    assert whole.code == 0, whole.text
    for steps, layout in ((3, []), (4, []), (6, ["parallel.tensor=2"])):
        ended = train(*chosen, *layout, f"run.dir={tmp_path}/parts", f"trainer.steps={steps}")
        assert ended.code == 0, ended.text
    expected, found = learned(tmp_path / "whole"), learned(tmp_path / "parts")
    assert found[:4] == expected[:4]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
