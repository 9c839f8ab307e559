"""Linear layers against megatron's own: the bias in the product, the gradient given to a sink."""

from collections.abc import Callable

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from frontier_llm.launch.world import World
from frontier_llm.model.linear import ColumnLinear, RowLinear
from frontier_llm.protocols import set_product_sink
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.values import tiny_values

KINDS: dict[type, type] = {ColumnLinear: ColumnParallelLinear, RowLinear: RowParallelLinear}
TENSOR = ["parallel.tensor=2"]
SEQUENCE = [*TENSOR, "parallel.sequence=true"]


class Sink:
    """Calls a function with the two factors."""

    is_deferring = False

    def __init__(self, take: Callable[[Tensor, Tensor], None]) -> None:
        self._take = take

    def __call__(self, grad_outputs: Tensor, inputs: Tensor, gather: object = None) -> None:
        assert gather is None
        self._take(grad_outputs, inputs)


def forward_and_gradients(
    layer: nn.Module, kind: type, x: Tensor
) -> tuple[bool, Tensor, dict[str, Tensor]]:
    """Return whether the bias is added, the whole output, and all gradients."""
    for leaf in (x, *layer.parameters()):
        leaf.grad = None
    out, bias = kind.forward(layer, x)
    whole = out if bias is None else out + bias
    probe = torch.cos(torch.arange(whole.numel())).view_as(whole)
    (whole * probe).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return bias is None, whole, {"x": x.grad, **gradients}


def both_ways(world: World, overrides: list[str]) -> list[tuple[str, bool, float]]:
    """Return, per layer of the first block: name, whether its bias is added, error."""
    rig = make_rig(world, tiny_values(*overrides, "sharding.fused_gradients=false"))
    head = rig.model.chunks[0].output_layer
    assert type(head) is ColumnLinear
    found = []
    for name, layer in rig.model.chunks[0].named_modules():
        is_used = ".layers.0." in name or (layer is head and layer.weight is not None)
        if type(layer) not in KINDS or not is_used:
            continue
        # copies, since the hooks of the rank's own parameters would move the gradients away
        for attribute, parameter in list(layer.named_parameters()):
            copy = nn.Parameter(torch.randn_like(parameter))
            setattr(layer, attribute, copy)
        x = torch.randn(8, 2, layer.weight.shape[1], requires_grad=True)
        _, *theirs = forward_and_gradients(layer, KINDS[type(layer)], x)
        given: list[Tensor] = []
        sink = Sink(lambda left, right, to=given: to.append(left.t() @ right))
        set_product_sink(layer.weight, sink)
        added, *mine = forward_and_gradients(layer, type(layer), x)
        assert "weight" not in mine[1]
        (mine[1]["weight"],) = given
        assert mine[1].keys() == theirs[1].keys()
        pairs = [(mine[0], theirs[0]), *((mine[1][k], theirs[1][k]) for k in theirs[1])]
        error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        found.append((name, added, error))
    return found


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, []),
        (1, ["model.bias=false", "model.activation=swiglu", "model.tied=false"]),
        (2, TENSOR),
        (2, [*SEQUENCE, "model.tied=false"]),
    ],
    ids=["bias", "no_bias", "tensor", "sequence"],
)
def test_a_layer_with_a_sink_equals_megatrons(ranks: int, overrides: list[str]) -> None:
    for found in run_ranks(both_ways, ranks, overrides):
        assert len(found) == 4 + ("model.tied=false" in overrides)
        for name, added, error in found:
            assert error < 1e-6, (name, error)
            assert added or ranks > 1, name
        if ranks > 1:
            handed_on = {name.rsplit(".", 1)[1] for name, added, _ in found if not added}
            assert handed_on >= {"linear_proj", "linear_fc1", "linear_fc2"}


def order_of_calls(world: World, overrides: list[str]) -> dict[str, list[str]]:
    """Return, per layer of the first block, the collectives, waits and products of its backward."""
    rig = make_rig(world, tiny_values(*overrides))
    rig.states.begin_step(1, 1)
    found = {}
    for name, layer in rig.model.chunks[0].named_modules():
        if type(layer) is not ColumnLinear or ".layers.0." not in name:
            continue
        x = torch.randn(8, 2, layer.weight.shape[1], requires_grad=True)
        calls: list[str] = []
        set_product_sink(layer.weight, Sink(lambda *_, to=calls: to.append("product")))
        out, _ = layer(x)
        with Recorded(calls):
            out.sum().backward()
        found[name] = calls
    return found


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes the names of collectives and products to a list."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d":
            self._calls.append(name)
        elif name in ("mm", "bmm", "addmm"):
            self._calls.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (TENSOR, ["product", "allreduce_", "product"]),
        (SEQUENCE, ["_allgather_base_", "product", "_reduce_scatter_base_", "product"]),
    ],
    ids=["tensor", "sequence"],
)
def test_collectives_start_before_the_products_that_hide_them(
    overrides: list[str], expected: list[str]
) -> None:
    for found in run_ranks(order_of_calls, 2, overrides):
        assert len(found) == 2
        assert all(calls == expected for calls in found.values()), found
