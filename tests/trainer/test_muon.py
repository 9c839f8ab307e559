"""Muon: orthogonal updates of separate matrices, equal in all layouts that it allows."""

from itertools import product
from typing import Any

import pytest
import torch

from frontier_lab.planning.state_layout import StateLayout
from frontier_llm.cli.compose import compose
from frontier_llm.collectives.transport import Transport, narrow
from frontier_llm.config import decode
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.launch.world import World
from frontier_llm.sharding.muon import orthogonalise
from frontier_llm.sharding.parameters import Parameters
from frontier_llm.sharding.unit_gradients import UnitGradients
from tests.covering import covering, one_in
from tests.ranks import run_ranks
from tests.streams.mutations import Mutation, mutated
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import BATCH, MODELS, STEPS, check, compare, train_and_collect
from tests.trainer.test_sharding_parity import factors
from tests.values import TINY_T5, tiny_values

MUON = ["optimizer.name=muon"]
MODEL = {**MODELS, "t5": TINY_T5}


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = left.T @ orthogonalise(matrix) @ right.T
    found = result.diagonal()
    large = values > 0.02 * values.max()
    assert found[large].min() > 0.6
    assert found.max() < 1.3
    assert (result - torch.diag(found)).abs().max() < 1e-4  # the same singular vectors


def expected(name: str, update: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Return the direction of a parameter, by explicit indices of its separate matrices."""
    rows, result = torch.arange(len(update)), torch.empty_like(update)
    if ".attention.qkv." in name:
        size = len(update) // (heads + 2 * kv_heads)
        place = rows // size % (heads // kv_heads + 2)  # place of the head in its group
        kinds = (place - (heads // kv_heads - 1)).clamp(min=0)
    elif ".cross_attention.key_value." in name:
        kinds = rows // (len(update) // kv_heads // 2) % 2
    elif ".ffn.gate." in name:
        kinds = rows // (len(update) // 2)
    else:
        kinds = rows * 0
    for kind in kinds.unique():
        matrix = update[kinds == kind]
        result[kinds == kind] = 0.2 * max(matrix.shape) ** 0.5 * orthogonalise(matrix)
    return result


def differences(world: World, values: dict[str, Any]) -> dict[str, float]:
    """Return for each matrix of a layer the largest difference from the formula in two steps."""
    rig = make_rig(world, values)
    rate, decay, found = 0.01, rig.config.optimizer.weight_decay, {}
    momenta: dict[str, torch.Tensor] = {}
    model = rig.config.model
    for step in (1, 2):
        rig.states.settle()
        before = {s.record.name: s.master.clone() for s in rig.states.shards()}
        rig.step.run(step, rig.batches(step - 1), rate)
        gradients = {r.name: gradient.clone() for r, _, gradient in rig.states.gradients()}
        for shard in rig.states.shards():
            name, shape = shard.record.name, shard.record.parameter.shape
            if shard.record.group != "matrices" or len(shape) != 2:
                continue
            momenta[name] = 0.95 * momenta.get(name, 0) + gradients[name]
            update = (gradients[name] + 0.95 * momenta[name]).view(shape)
            moved = expected(name, update, model.heads, model.kv_heads).flatten()
            wanted = before[name] * (1 - rate * decay) - rate * moved
            found[f"{name} {step}"] = (shard.master - wanted).abs().max().item()
    return found


@pytest.mark.parametrize("model", ["untied_gqa_swiglu", "t5"])
def test_fused_matrices_are_orthogonalised_one_by_one(model: str) -> None:
    values = tiny_values(*MODEL[model], *MUON, *BATCH)
    found = run_ranks(differences, 1, values)[0]
    assert len(found) >= 2 * 4
    assert max(found.values()) < 1e-5, found


ALL = ["sharding.params=all", "sharding.grads=all", "sharding.optimizer=all"]
OWNED = {
    "replicated": (2, ["sharding=replicated"]),
    "zero1": (4, ["sharding=zero1"]),
    "amsp": (4, ["sharding.params=1", "sharding.grads=2", "sharding.optimizer=4"]),
    "replicas": (4, ["sharding.params=2", "sharding.grads=2", "sharding.optimizer=2"]),
    "all": (4, ALL),
    "tensor2_all": (4, ["parallel.tensor=2", *ALL]),
    "pipeline2_chunks2": (4, ["parallel.pipeline=2", "parallel.chunks=2", *ALL]),
}
"""Layouts in which each matrix has an owner: ranks, and overrides."""


OF_T5 = ("zero1", "replicas", "all")
CASES = [
    (layout, model)
    for layout, model in product(OWNED, ["untied_gqa_swiglu", "t5"])
    if model != "t5" or layout not in ("replicated", "pipeline2_chunks2")
]
COVERED = [(layout, model) for layout, model in CASES if (layout in OF_T5) != (model == "t5")]
"""Layouts that always run with the other model."""
COVERED += [("all", "t5"), ("replicated", "untied_gqa_swiglu")]
"""Layouts whose matrices are divided as in others, or not at all."""


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_layouts_agree(case: tuple[str, str]) -> None:
    layout, model = case
    size, overrides = OWNED[layout]
    compare(size, overrides, [*MODEL[model], *MUON, *BATCH])


TWO_HOPS = {
    "parameters, then gradients": (4, factors((2, 4, 4))),
    "gradients, then states": (4, factors((1, 2, 4))),
    "parameters over two nodes": (2, factors((4, 4, 4))),
    "gradients over two nodes": (2, factors((1, 4, 4))),
    "states over two nodes": (2, factors((1, 1, 4))),
}
"""Layouts in which matrices are reduced or gathered over two groups, one after the other: ranks per
node, and overrides."""
OF_MODEL = [*MODELS["untied_gqa_swiglu"], *MUON, *BATCH]


def compare_hops(layout: str, mutation: Mutation | None = None) -> None:
    per_node, overrides = TWO_HOPS[layout]
    values = tiny_values(*OF_MODEL, *overrides)
    arguments = (mutation, train_and_collect, values, "fp32")
    results = run_ranks(mutated, 4, *arguments, ranks_per_node=per_node)
    check(results, overrides, OF_MODEL, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", one_in(2, TWO_HOPS))
def test_matrices_over_two_hops(layout: str) -> None:
    compare_hops(layout)


MISTAKES: dict[str, tuple[str, Mutation]] = {
    "borders of the second hop are those of the first": (
        "parameters, then gradients",
        (narrow, "[bound - own[0] for bound in own]", "list(own)"),
    ),
    "all ranks take the borders of the first": (
        "gradients over two nodes",
        (narrow, "bounds[group.rank() * step : (group.rank() + 1)", "bounds[: 1"),
    ),
    "borders of a gather count from the buffer": (
        "states over two nodes", (Transport._gather_hops, "bound - parts[first]", "bound"),
    ),
    "parameters are gathered over the nearest group first": (
        "parameters over two nodes",
        (Parameters.__init__, 'groups.along("params")[::-1]', 'groups.along("params")'),
    ),
    "a refresh gathers over the nearest group first": (
        "gradients, then states",
        (Parameters.__init__, '"optimizer")[::-1]', '"optimizer")'),
    ),
    "gradients are reduced over the farthest group first": (
        "parameters, then gradients",
        (
            UnitGradients._hops,
            "self._groups.groups.items()",
            "reversed(self._groups.groups.items())",
        ),
    ),
}  # fmt: skip
"""By name: the layout that notices, and the change of the source."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", covering(MISTAKES, [*MISTAKES][1:5]))
def test_mistakes_are_noticed(mistake: str) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare_hops(*MISTAKES[mistake])


@pytest.mark.parametrize("sharding", covering(["zero1", "zero2", "zero3"], ["zero2"]))
def test_it_sends_the_bytes_that_adamw_sends(sharding: str) -> None:
    sent = {}
    for name in ("adamw", "muon"):
        values = compose(
            ["model=llama_7b", "parallel.pipeline=1", f"sharding={sharding}", "launch.ranks=32",
             "launch.ranks_per_node=8", f"optimizer={name}", "data.global_batch=32",
             "data.micro_batch=1", "precision=bf16"]
        )  # fmt: skip
        layout = StateLayout.of(decode(values))
        sent[name] = sum(s.total for by_rank in layout.sent().values() for s in by_rank)
    assert sent["muon"] == pytest.approx(sent["adamw"], rel=0.01)


def test_quantised_gradients_are_refused() -> None:
    overrides = ["optimizer=muon", "sharding=zeropp", "collectives=zeropp", "parallel.pipeline=1"]
    with pytest.raises(ConfigError) as caught:
        ResolvedLayout.resolve(decode(compose(overrides)), 2, 2)
    assert caught.value.key == "collectives"
