"""The table of behaviours: what modules and training loops do that wrappers must get right.

The lists of DistributedDataParallel and of FSDP2 are in it: unused parameters, static graphs,
gradient accumulation in `no_sync`, uneven inputs, mixed precision, frozen and shared parameters.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from frontier_llm.library import Precision, Sharded
from tests.engine import modules as m
from tests.engine.modules import Block, Net, Stack
from tests.engine.reference import WIDTH, Batch, Behaviour, mse

OTHER_LAYERS = "the ranks have used different layers"
KEY_BIAS = ("in_proj_bias",)
"""The gradient of the part for keys is 0 but for rounding, which Adam makes as large as others."""


def net(
    block: Callable[[], nn.Module] = Block,
    run: m.Layers = m.in_order,
    change: Callable[[Net], object] = lambda net: None,
) -> Callable[[], nn.Module]:
    return partial(Net, block, run, change)


def squares(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = module(batch.x).square().mean()
    return loss


def output_is_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = module(batch.x)
    return loss


def with_step(module: nn.Module, batch: Batch) -> torch.Tensor:
    module.step, module.rank = batch.step, batch.rank
    return mse(module, batch)


# ---- weights that several modules share


def weight_of_layer_outside(net: Net, x: torch.Tensor) -> torch.Tensor:
    return m.in_order(net, x) + F.linear(x, net.layers[0].up.weight[:WIDTH])


def share(net: Net) -> None:
    net.layers[2].up.weight = net.layers[0].up.weight


def tie_to_layer(net: Net) -> None:
    net.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    net.out.weight = net.layers[0].up.weight


def repeat_layer(net: Net) -> None:
    net.layers = nn.ModuleList([net.layers[0], net.layers[1], net.layers[0]])


SHARED = {
    "tied table": Behaviour(m.Tied, output_is_loss),
    "weight shared by layers": Behaviour(net(change=share)),
    "same layer twice in the list": Behaviour(net(change=repeat_layer)),
    "weight of a layer outside": Behaviour(net(run=weight_of_layer_outside)),
    "head tied to a layer": Behaviour(net(change=tie_to_layer), squares),
}

# ---- frozen and unused parameters


def freeze(*words: str, but: bool = False) -> Callable[[Net], object]:
    """Freeze the parameters whose name has one of the words, or the others."""

    def change(net: nn.Module) -> None:
        for name, parameter in net.named_parameters():
            if any(word in name for word in words) != but:
                parameter.requires_grad_(False)

    return change


def thaw_and_freeze(module: nn.Module, step: int, states: Sharded | None) -> None:
    """Freeze weights in step 2."""
    for name, parameter in module.named_parameters():
        if "up." in name:
            parameter.requires_grad_(step != 2)


def dropping(offset: Callable[[Net], int]) -> m.Layers:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(net.layers):
            x = layer(x) if (offset(net) + index) % 3 else x
        return x

    return run


def first_output(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Use the second output of the layers in the first step only."""
    for layer in net.layers:
        x, y = layer(x)
        x = x + y if net.step < 2 else x
    return x


def in_one_micro_batch(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Use the layers in one micro-batch of two."""
    module.step += 1
    return mse(module, batch) if module.step % 2 else module.out(batch.x).square().mean()


FROZEN = {
    "frozen outside layers": Behaviour(net(change=freeze("inp."))),
    "frozen inside layers": Behaviour(net(change=freeze("up."))),
    "a frozen layer": Behaviour(net(change=freeze("layers.1"))),
    "only biases train": Behaviour(net(change=freeze("bias", but=True))),
    "adapters": Behaviour(net(m.Lora, change=freeze("inp.", "out."))),
    "frozen between steps": Behaviour(before=thaw_and_freeze),
    "unused parameter in layers": Behaviour(net(m.WithUnused)),
    "unused layer": Behaviour(net(run=dropping(lambda net: 0))),
    "unused module": Behaviour(net(change=lambda net: net.add_module("never", nn.Linear(3, 3)))),
    "layers dropped": Behaviour(net(run=dropping(lambda net: net.step)), with_step),
    "layers dropped by rank": Behaviour(
        net(run=dropping(lambda net: net.step + net.rank)),
        with_step,
        joint=False,
        refused=OTHER_LAYERS,
    ),
    "layers dropped by pair of ranks": Behaviour(
        net(run=dropping(lambda net: net.step + net.rank // 2)),
        with_step,
        joint=False,
        refused=OTHER_LAYERS,
        together=4,
    ),
    "unused output": Behaviour(net(m.Two, first_output), with_step),
    "layers used in one micro-batch": Behaviour(loss=in_one_micro_batch, micro_batches=2),
}  # fmt: skip

# ---- calls of modules


def twice(net: Net, x: torch.Tensor) -> torch.Tensor:
    return m.in_order(net, m.in_order(net, x))


def again_without_grad(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x)
        with torch.no_grad():
            more = torch.relu(layer(x))
        x = x + more
    return x


def by_method(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer.body(x)
    return x


def by_weight(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = x + torch.tanh(F.linear(x, layer.weight, layer.bias))
    return x


def by_name(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = x + torch.tanh(layer["b"](layer["a"](x)))
    return x


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = torch.relu_(layer(x).add_(1.0) * 1.0)
    return x


def by_keyword(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x=x)
    return x


def pairs() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def three_calls(module: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch.x
    # squares: outputs that cancel in a mean would leave a loss that is mostly rounding errors
    loss: torch.Tensor = (module(x) - module(-x)).square().mean() + module(2 * x).square().mean()
    return loss


def by_parts(module: nn.Module, batch: Batch) -> torch.Tensor:
    x = m.in_order(module, module.inp(batch.x))
    loss: torch.Tensor = (module.out(x) - batch.x).square().mean()
    return loss


def with_auxiliary(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss = mse(module, batch)
    return loss + 0.1 * sum(layer.loss for layer in module.layers)


def penalty(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that has the gradient of an output with respect to the input."""
    x = batch.x.clone().requires_grad_()
    y = module(x).square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return gradient.square().mean() + 0.01 * y / len(x)


CALLS = {
    "layers called twice": Behaviour(net(run=twice)),
    "again without gradients": Behaviour(net(run=again_without_grad)),
    "three calls of the module": Behaviour(loss=three_calls),
    "root is not called": Behaviour(loss=by_parts),
    "layers called by a method": Behaviour(net(run=by_method)),
    "weights of layers read": Behaviour(net(linear, by_weight)),
    "layers are dictionaries": Behaviour(net(pairs, by_name)),
    "keyword arguments": Behaviour(net(run=by_keyword)),
    "outputs changed in place": Behaviour(net(run=in_place)),
    "auxiliary loss": Behaviour(net(m.Auxiliary), with_auxiliary),
    "loss by an attribute only": Behaviour(net(m.OnlyAuxiliary), with_auxiliary),
    "gradient penalty": Behaviour(loss=penalty),
    **{
        f"output: {kind}": Behaviour(net(partial(m.Packing, kind), m.unpacking(kind)))
        for kind in m.CONTAINERS
    },
}

# ---- kinds of parameters and modules


def transpose(net: Net) -> None:
    net.inp.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) * 0.2).t())
    net.layers[1].up.weight = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) * 0.2).t())


def normalise_weights(net: Net) -> None:
    for layer in (net.inp, net.layers[0].up):
        parametrizations.weight_norm(layer)


def compile_layers(net: Net) -> None:
    for layer in net.layers:
        layer.compile(backend="eager")


def compiled_after(module: nn.Module, batch: Batch) -> torch.Tensor:
    if "compiled" not in module.__dict__:
        module.__dict__["compiled"] = torch.compile(module, backend="eager")
    loss: torch.Tensor = (module.__dict__["compiled"](batch.x) - batch.x).square().mean()
    return loss


def halve_gradients(net: Net) -> None:
    net.inp.weight.register_hook(lambda gradient: gradient / 2)
    net.layers[1].up.weight.register_hook(lambda gradient: gradient / 2)


def watch_gradients(net: Net) -> None:
    for layer in net.layers:
        layer.register_full_backward_hook(lambda _, __, outputs: (outputs[0] * 0.5,))


def under_autocast(module: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mse(module, batch).float()


BFLOAT = Precision(torch.bfloat16)
ROUNDING = 2.0**-8
"""The relative error of one rounding to bf16. The ranks add gradients in another order than one
process does. A sum in fp32 that differs in its last digit may round to another number in bf16."""


def lower(module: nn.Module, batch: Batch) -> torch.Tensor:
    return mse(module, batch).float()


KINDS = {
    "no dimension, no elements": Behaviour(net(m.Scaled)),
    "not contiguous": Behaviour(net(change=transpose)),
    "images in channels_last": Behaviour(m.Images),
    "nested lists": Behaviour(net(m.Nested)),
    "sequential": Behaviour(lambda: nn.Sequential(linear(), nn.Tanh(), linear())),
    "attention": Behaviour(net(m.Attention), noise=KEY_BIAS),
    "recurrent": Behaviour(net(m.Recurrent)),
    "weight norm": Behaviour(net(change=normalise_weights)),
    "sparse gradients": Behaviour(m.Table),
    "uneven widths": Behaviour(lambda: Stack(*(m.Wide(f, False) for f in (3, 4, 3)))),
    "buffers": Behaviour(lambda: Stack(*(m.Wide(4, True) for _ in range(3)))),
    "hooks of gradients": Behaviour(net(change=halve_gradients)),
    "hooks of modules": Behaviour(net(change=watch_gradients)),
    "compiled layers": Behaviour(net(change=compile_layers)),
    "compiled afterwards": Behaviour(loss=compiled_after),
    "autocast": Behaviour(loss=under_autocast, joint=False),
    "bf16": Behaviour(
        loss=lower, precision=BFLOAT, joint=False, tolerance=ROUNDING
    ),
    "bf16, inputs and outputs fp32": Behaviour(
        lambda: Stack(Block(), Block()),
        precision=Precision(torch.bfloat16, torch.float32, cast_forward_inputs=True),
        joint=False,
        tolerance=ROUNDING,
    ),
}  # fmt: skip
