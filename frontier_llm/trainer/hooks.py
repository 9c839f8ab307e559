"""Hooks on modules that gather sharded parameters before they are read and release them after.

A unit is a set of parameters that are gathered together: a layer, the embedding or the head. A
reader is a module that reads the parameters of some units. To acquire a unit is to gather its
parameters; to release it allows `sharding` to free them.

The hooks acquire the units of a reader before its forward pass and release them after it. They
acquire the units again before its backward pass, when the gradient of its output arrives. After the
backward pass `sharding` releases them itself, when all gradients of a unit are computed.

The start of a backward pass is found by a hook on the output tensor. torch's backward hooks on
modules are not used: they replace the output by a view, whose memory megatron's pipeline cannot
free, and they are called before the gradients of the weights exist.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from frontier_llm.model.build import Model
from frontier_llm.model.unit_readers import UnitReader, unit_readers
from frontier_llm.sharding.sharded_states import ShardedStates


def attach(model: Model, states: ShardedStates, tied: bool) -> None:
    """Attach the hooks to all model chunks of a rank. The hooks are never removed.

    Args:
        model: the model chunks of this rank.
        states: the states that the modules' parameters belong to.
        tied: whether the output layer shares the weights of the embedding.
    """
    for chunk in model.chunks:
        for reader in unit_readers(chunk, tied):
            _attach_reader(reader, states)


def _attach_reader(reader: UnitReader, states: ShardedStates) -> None:
    """Attach the hooks of one reader."""
    units = states.units(reader.units)

    def acquire(*_: Any) -> None:
        states.acquire(units, backward=_in_backward())

    def release(*_: Any) -> None:
        if not _in_backward():  # recomputed activations: the backward pass reads the units next
            states.release(units)

    reader.module.register_forward_pre_hook(acquire)
    if reader.in_backward:
        _before_backward(reader.module, lambda: states.acquire(units, backward=True))
    reader.module.register_forward_hook(release)


def _before_backward(module: nn.Module, action: Callable[[], None]) -> None:
    """Call `action` when the gradient of a module's output arrives."""

    def on_gradient(_: torch.Tensor) -> None:
        action()

    def on_output(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(on_gradient)
                return

    module.register_forward_hook(on_output)


def _tensors(output: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in a module's output."""
    items = output if isinstance(output, tuple) else (output,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _in_backward() -> bool:
    """Return whether autograd runs. A forward pass inside it recomputes activations."""
    return torch._C._current_graph_task_id() != -1
