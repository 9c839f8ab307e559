"""The part of the table of behaviours about the training loop and recomputed activations."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from frontier_llm.library import AdamW, ParameterGroup, Sharded
from tests.engine import modules
from tests.engine.behaviours import CALLS, FROZEN, KINDS, SHARED, net, squares
from tests.engine.modules import Net
from tests.engine.reference import WIDTH, Batch, Behaviour, mse, rows


def evaluate(module: nn.Module, step: int, states: Sharded | None) -> None:
    """Evaluate without gradients, in two modes."""
    module.eval()
    with torch.no_grad():
        first = module(rows(99, 0))
    with torch.inference_mode():
        assert torch.equal(first, module(rows(99, 0)))
    module.train()


def drop_forward(module: nn.Module, step: int, states: Sharded | None) -> None:
    """Compute an output whose backward pass never runs."""
    module(rows(99, 0))


def fail(*_: Any) -> None:
    raise ValueError("planned")


def fail_in_forward(module: nn.Module, step: int, states: Sharded | None) -> None:
    with suppress(RuntimeError):
        module(torch.zeros(2, WIDTH + 1))
    hook = module.layers[1].up.register_forward_hook(fail)
    with suppress(ValueError):
        module(rows(99, 0))
    hook.remove()


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("planned")


def fail_in_backward(passes: int, is_called_directly: bool = False) -> Any:
    """Return what fails in a backward pass after so many others, which are repeated then."""

    def before(module: nn.Module, step: int, states: Sharded | None) -> None:
        if step not in (1, 3) or states is None:
            return
        for _ in range(passes):
            states.backward(mse(module, Batch(rows(98, 0), 0, 0)))
        layer = module.layers[1]
        hook = layer.register_forward_hook(lambda _, __, output: FailsInBackward.apply(output))
        loss = mse(module, Batch(rows(97, 0), 0, 0))
        hook.remove()
        with suppress(ValueError):
            if is_called_directly:
                loss.backward()
            else:
                states.backward(loss)
        states.drop_step()

    return before


def direct(loss: torch.Tensor, states: Sharded | None) -> None:
    loss.backward()


def repeat(loss: torch.Tensor, states: Sharded | None) -> None:
    """Run the backward pass of a graph twice, whose mean is that of one."""
    if states is not None:
        loss.backward(retain_graph=True)
    loss.backward()


def waiting(size: int) -> Callable[[torch.Tensor, Sharded | None], None]:
    """Return a backward that waits for all forward passes, and runs in the reverse order."""
    losses: list[torch.Tensor] = []

    def backward(loss: torch.Tensor, states: Sharded | None) -> None:
        losses.append(loss)
        if len(losses) == size:
            while losses:
                losses.pop().backward()

    return backward


def evaluated(module: nn.Module, batch: Batch) -> torch.Tensor:
    evaluate(module, 0, None)
    return mse(module, batch)


def one_of_two(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Use one of two losses in each step."""
    out = module(batch.x)
    return out.square().mean() if batch.step % 2 else (out - batch.x).abs().mean()


def sums(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = module(batch.x).square().sum() / 8
    return loss


def with_groups(module: nn.Module) -> AdamW:
    """Lower rates for lower layers, and weight decay for some weights only."""
    layers = module.layers
    groups = [
        ParameterGroup(layer.parameters(), rate_factor=0.5**number, weight_decay=0.02 * number)
        for number, layer in enumerate(layers)
    ]
    groups.append(ParameterGroup([module.inp.weight], rate_factor=2.0))
    return AdamW(clip_norm=0.5, weight_decay=0.2, groups=groups)


LOOPS = {
    "plain": Behaviour(),
    "micro-batches": Behaviour(micro_batches=3),
    "no_sync": Behaviour(micro_batches=3, no_sync=True),
    "loss.backward": Behaviour(backward=direct),
    "backward twice": Behaviour(backward=repeat, settings={"micro_batches": 2}),
    "forwards before backwards": Behaviour(
        micro_batches=2, joint=True, backward=waiting(2)
    ),
    "replicas": Behaviour(settings={"params": 1, "grads": 2, "optimizer": 2}),
    "one of two losses": Behaviour(loss=one_of_two),
    "evaluation mode": Behaviour(before=lambda module, step, states: module.eval()),
    "evaluation between steps": Behaviour(before=evaluate),
    "evaluation between micro-batches": Behaviour(loss=evaluated, micro_batches=2),
    "forward without backward": Behaviour(before=drop_forward),
    "other sizes in each step": Behaviour(
        rows=lambda step, rank: rows(step, rank, 2 + step // 10 % 3)
    ),
    "other sizes on each rank": Behaviour(
        loss=squares, rows=lambda step, rank: rows(step, rank, 1 + rank), joint=False
    ),
    "ranks without samples": Behaviour(
        loss=sums, rows=lambda step, rank: rows(step, rank, rank % 2 * 4), joint=False
    ),
    "errors in forward": Behaviour(before=fail_in_forward),
    "error in backward": Behaviour(before=fail_in_backward(0)),
    "error in the second backward": Behaviour(before=fail_in_backward(1), micro_batches=2),
    "error in loss.backward": Behaviour(before=fail_in_backward(1, True), micro_batches=2),
    "no clipping": Behaviour(update=lambda module: AdamW(clip_norm=None)),
    "strong clipping": Behaviour(
        update=lambda module: AdamW(clip_norm=0.01, epsilon=1e-3, beta1=0.8, beta2=0.99)
    ),
    "groups of parameters": Behaviour(update=with_groups),
}  # fmt: skip

# ---- recomputation


def recomputed(reentrant: bool) -> modules.Layers:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    return run


def all_in_one(net: Net, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(modules.in_order, net, x, use_reentrant=False)


def in_two_levels(net: Net, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(recomputed(False), net, x, use_reentrant=False)


def seeded(module: nn.Module, batch: Batch) -> torch.Tensor:
    torch.manual_seed(1000 * batch.step + batch.rank)
    return mse(module, batch)


def recomputed_parts(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Let the first gradient of a parameter arrive in the backward pass of a recomputation."""
    x: torch.Tensor = module.inp(batch.x)
    return recomputed(True)(module, x).square().mean()


RECOMPUTED = {
    "recomputed": Behaviour(net(run=recomputed(False))),
    "recomputed, reentrant": Behaviour(net(run=recomputed(True))),
    "recomputed, reentrant, root is not called": Behaviour(loss=recomputed_parts),
    "recomputed inside layers": Behaviour(net(modules.Recomputed)),
    "recomputed, all layers at once": Behaviour(net(run=all_in_one)),
    "recomputed with dropout": Behaviour(
        net(partial(modules.Recomputed, 0.5)), seeded, joint=False
    ),
}  # fmt: skip

BEHAVIOURS = LOOPS | SHARED | FROZEN | CALLS | KINDS | RECOMPUTED
