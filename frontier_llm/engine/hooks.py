"""Hooks on modules that gather sharded parameters before they are read and release them after.

A unit is a set of parameters that are gathered together, such as a layer. A reader is a module that
reads units. To acquire a unit is to gather it; to release it allows `sharding` to free it.

The hooks acquire the units of a reader before its forward pass and release them after it. They
acquire the units again before its backward pass, when the gradient of its output arrives. After the
backward pass `sharding` releases them itself, when all gradients of a unit are computed.

Hooks on the output tensors find the start of a backward pass. torch's backward hooks on modules
replace the output by a view, whose memory megatron's pipeline cannot free.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from frontier_llm.protocols import UnitReader
from frontier_llm.sharding.guarded import in_backward
from frontier_llm.sharding.sharded_states import ShardedStates


class Hook:
    """A function that a module calls. `torch.compile` does not trace it, nor do copies call it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook(lambda *_: None)


def attach(
    readers: Iterable[UnitReader],
    states: ShardedStates,
    hook: Callable[[Callable[..., Any]], Callable[..., Any]] = Hook,
) -> None:
    """Attach the hooks, of which `hook` makes each from a function. They are never removed."""
    for reader in readers:
        _attach(reader, states, hook)


def _attach(
    reader: UnitReader,
    states: ShardedStates,
    hook: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    units = states.units(reader.units)

    def acquire(*_: Any) -> None:
        states.acquire(units, backward=in_backward())

    def release(*_: Any) -> None:
        is_kept = reader.release == "without_grad" and torch.is_grad_enabled()
        if not is_kept and not in_backward():  # a backward pass reads what it recomputes
            states.release(units)

    def on_output(_: nn.Module, __: Any, output: Any) -> None:
        is_first = [True]

        def on_gradient(_: torch.Tensor) -> None:
            if is_first:
                is_first.clear()
                states.acquire(units, backward=True)

        for tensor in differentiable(output):
            tensor.register_hook(on_gradient)

    reader.module.register_forward_pre_hook(hook(acquire))
    if reader.in_backward:
        reader.module.register_forward_hook(hook(on_output))
    if reader.release != "never":
        reader.module.register_forward_hook(hook(release))


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors in the output of a module that have a gradient."""
    return [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
