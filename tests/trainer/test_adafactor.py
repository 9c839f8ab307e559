"""Adafactor: equal to the implementation of transformers, in all layouts."""

from itertools import product
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from frontier_llm.launch.world import World
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import BATCH, MODELS, compare
from tests.values import T5GEMMA2, TINY_T5, tiny_values

ADAFACTOR = ["optimizer.name=adafactor", "optimizer.beta1=0", "optimizer.beta2=0.9999"]
MODEL = {**MODELS, "t5": TINY_T5, "t5gemma2": T5GEMMA2}
RATE, STEPS = 0.01, 3


def split(name: str, matrix: torch.Tensor, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """Return the separate matrices of a parameter, by explicit indices."""
    rows = torch.arange(len(matrix))
    if name.endswith(".attention.qkv.weight"):
        size = len(matrix) // (heads + 2 * kv_heads)
        place = rows // size % (heads // kv_heads + 2)  # place of the head in its group
        kinds = (place - (heads // kv_heads - 1)).clamp(min=0)
    elif name.endswith("attention.key_value.weight"):
        kinds = rows // (len(matrix) // kv_heads // 2) % 2
    elif name.endswith(".ffn.gate.weight"):
        kinds = rows // (len(matrix) // 2)
    else:
        return [matrix.clone()]
    return [matrix[kinds == kind].clone() for kind in kinds.unique()]


def differences(world: World, values: dict[str, Any]) -> dict[str, float]:
    """Train, and return by parameter the largest difference from transformers' Adafactor."""
    rig = make_rig(world, values)
    model = rig.config.model
    parts: dict[str, list[torch.nn.Parameter]] = {}
    peers: dict[str, Adafactor] = {}

    def pieces(name: str, flat: torch.Tensor) -> list[torch.Tensor]:
        return split(name, flat.view(shapes[name]), model.heads, model.kv_heads)

    shapes = {record.name: record.parameter.shape for record in rig.model.records}
    for shard in rig.states.shards():
        name = shard.record.name
        if "master" not in shard.states:
            continue
        parts[name] = [torch.nn.Parameter(part) for part in pieces(name, shard.master)]
        peers[name] = Adafactor(parts[name], lr=RATE, relative_step=False, scale_parameter=True)
    gradients: dict[str, torch.Tensor] = {}
    update = rig.states._optimizer.update

    def spy(rate: float, divisor: torch.Tensor, skip: torch.Tensor | None = None) -> None:
        for record, _, gradient in rig.states.gradients():
            gradients[record.name] = gradient / divisor
        update(rate, divisor, skip)

    rig.states._optimizer.update = spy  # type: ignore[method-assign]
    for step in range(1, STEPS + 1):
        rig.step.run(step, rig.batches(step - 1), RATE)
        for name, peer in peers.items():
            for part, gradient in zip(parts[name], pieces(name, gradients[name]), strict=True):
                part.grad = gradient
            peer.step()
    rig.states.settle()
    pairs = {
        shard.record.name: zip(
            pieces(shard.record.name, shard.master), parts[shard.record.name], strict=True
        )
        for shard in rig.states.shards()
        if "master" in shard.states
    }
    return {
        name: max((mine - theirs).abs().max().item() for mine, theirs in of_name)
        for name, of_name in pairs.items()
    }


@pytest.mark.parametrize("model", MODEL)
def test_it_equals_another_implementation(model: str) -> None:
    values = tiny_values(*MODEL[model], *ADAFACTOR, *BATCH, "optimizer.weight_decay=0.0")
    found = run_ranks(differences, 1, values)[0]
    assert len(found) > 10
    assert max(found.values()) < 2e-6, found


ALL = ["sharding.params=all", "sharding.grads=all", "sharding.optimizer=all"]
LAYOUTS = {
    "amsp": (4, ["sharding.params=1", "sharding.grads=2", "sharding.optimizer=4"]),
    "replicas": (4, ["sharding.params=2", "sharding.grads=2", "sharding.optimizer=2"]),
    "tensor2_sequence_all": (4, ["parallel.tensor=2", "parallel.sequence=true", *ALL]),
    "pipeline2": (4, ["parallel.pipeline=2", *ALL]),
}


CASES = list(product(LAYOUTS, ["untied_gqa_swiglu", "t5"]))
COVERED = [
    (layout, model) for layout, model in CASES
    if (layout in ("replicas", "pipeline2")) != (model == "t5")
]  # fmt: skip
"""Layouts that always run with the other model."""
COVERED += [("amsp", "untied_gqa_swiglu"), ("replicas", "t5")]
"""Layouts with a part of what the tensor group and the pipeline have, too."""


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES, COVERED), ids="-".join)
def test_layouts_agree(case: tuple[str, str]) -> None:
    layout, model = case
    size, overrides = LAYOUTS[layout]
    changes = ["optimizer.beta1=0.9"] if layout == "replicas" else []
    compare(size, overrides, [*MODEL[model], *ADAFACTOR, *changes, *BATCH])
