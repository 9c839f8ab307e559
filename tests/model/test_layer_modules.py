"""Linear layers with the bias in the product against megatron's own."""

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from frontier_llm.launch.world import World
from frontier_llm.model.linear import ColumnLinear, RowLinear
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import tiny_values

KINDS: dict[type, type] = {ColumnLinear: ColumnParallelLinear, RowLinear: RowParallelLinear}


def both_ways(world: World, overrides: list[str]) -> list[tuple[str, bool, float]]:
    """Return, per layer of the first block: name, whether its bias is added, error."""
    rig = make_rig(world, tiny_values(*overrides))
    found = []
    for name, layer in rig.model.chunks[0].named_modules():
        if type(layer) not in KINDS or ".layers.0." not in name:
            continue
        weights = [p for p in layer.parameters() if p.requires_grad]
        for weight in weights:
            torch.nn.init.normal_(weight.data)
        features = layer.weight.shape[1]
        x = torch.randn(7, 2, features, requires_grad=True)
        results = []
        for forward in (type(layer).forward, KINDS[type(layer)].forward):
            out, bias = forward(layer, x)
            added = bias is None
            whole = out if added else out + bias
            probe = torch.cos(torch.arange(whole.numel())).view_as(whole)
            gradients = torch.autograd.grad((whole * probe).sum(), [x, *weights])
            results.append((added, whole, *gradients))
        (added, *mine), (_, *theirs) = results
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True))
        found.append((name, added, error))
    return found


@pytest.mark.parametrize(
    "overrides", [[], ["model.bias=false", "model.activation=swiglu"]], ids=["bias", "no_bias"]
)
def test_a_fused_bias_equals_megatrons_layer(overrides: list[str]) -> None:
    (found,) = run_ranks(both_ways, 1, overrides)
    assert len(found) == 4
    for name, added, error in found:
        assert added, name
        assert error < 1e-6, (name, error)


def test_tensor_parallel_layers_are_megatrons() -> None:
    for found in run_ranks(both_ways, 2, ["parallel.tensor=2"]):
        handed_on = {name.rsplit(".", 1)[1] for name, added, _ in found if not added}
        assert handed_on == {"linear_proj", "linear_fc1", "linear_fc2"}
