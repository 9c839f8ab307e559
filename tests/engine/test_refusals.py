"""What cannot be right is an error with advice, on every rank, and training goes on after it."""

import copy
import functools
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from frontier_llm.errors import FrontierError, TrainingError
from frontier_llm.library import AdamW, Sharded, shard
from tests.engine.modules import Net
from tests.engine.reference import (
    RANKS,
    WIDTH,
    Batch,
    Behaviour,
    attempt,
    built,
    mse,
    on_one_start,
    rows,
    run_step,
)

pytestmark = pytest.mark.slow

ONES = torch.ones(WIDTH, WIDTH)
READS: dict[str, Callable[[nn.Parameter], object]] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "vector norm": lambda p: torch.linalg.vector_norm(p),
    "max": lambda p: torch.max(p),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "unbind": lambda p: p.unbind(),
    "add": lambda p: p + 1,
    "add to a number": lambda p: 1 + p,
    "product": lambda p: ONES @ p,
    "linear": lambda p: F.linear(ONES, p),
    "einsum": lambda p: torch.einsum("ij,jk", p, p),
    "concatenate": lambda p: torch.cat([p, p]),
    "in a list": lambda p: torch.stack([ONES, p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "where": lambda p: torch.where(ONES > 0, p, ONES),
    "as an operand": lambda p: ONES.clone().copy_(p),
    "equal": lambda p: torch.equal(p, ONES),
    "compare": lambda p: p > 0,
    "allclose": lambda p: torch.allclose(ONES, p),
    "convert": lambda p: p.to(torch.bfloat16),
    "double": lambda p: p.double(),
    "cpu": lambda p: p.cpu(),
    "storage": lambda p: p.untyped_storage(),
    "pointer": lambda p: p.data_ptr(),
    "list": lambda p: p.tolist(),
    "item": lambda p: p.item(),
    "bool": lambda p: bool(p),
    "numpy": lambda p: p.numpy(),
    "array": lambda p: np.asarray(p),
    "dlpack": lambda p: torch.from_dlpack(p),
    "as tensor": lambda p: torch.as_tensor(p).sum(),
    "parameter": lambda p: nn.Parameter(p),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "all_reduce": lambda p: dist.all_reduce(p),
    "operator": lambda p: torch.ops.aten.sum(p),
    "another module": lambda p: functional_call(nn.Linear(WIDTH, WIDTH), {"weight": p}, (ONES,)),
    "optimizer": lambda p: torch._foreach_add_([ONES.clone()], [p]),
    "zero": lambda p: p.zero_(),
    "write": lambda p: p.__setitem__(0, 1.0),
    "initialise": lambda p: nn.init.normal_(p),
    "vector of all": lambda p: nn.utils.parameters_to_vector([p]),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: torch.save({"p": p}, io.BytesIO()),
    "safetensors": lambda p: safetensors.torch.save({"p": p}),
    "shared memory": lambda p: p.share_memory_(),
}
"""Ways to read or to write a parameter. Functions of torch that no subclass of a tensor can
override, such as torch.tensor, are not among them."""

BEHAVIOUR = Behaviour()


def trained(params: int, steps: int = 1, make: Callable[[], nn.Module] = Net) -> Sharded:
    states = shard(built(Behaviour(make)), params=params, ranks_per_node=2)
    for step in range(1, steps + 1):
        run_step(BEHAVIOUR, states, step)
    return states


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises(FrontierError) as caught:
        work()
    return str(caught.value)


def reads_are_refused(steps: int) -> None:
    states = trained(2, steps)
    true = {name: value.clone() for name, value in states.named_parameters()}
    for module, name in ((states.module.inp, "inp"), (states.module.layers[1].up, "layers.1.up")):
        for way, read in READS.items():
            error = error_of(partial(read, module.weight))
            assert f"{name}.weight is read outside" in error, way
    assert "not available" in repr(states.module.inp.weight)
    assert "not available" in f"{states.module.inp.weight}"
    assert "in_features" in repr(states.module)
    for work in (states.module.state_dict, lambda: copy.deepcopy(states.module)):
        assert "states.gathered()" in error_of(work)
    assert "states.gathered()" in error_of(
        lambda: torch.save(states.module.state_dict(), io.BytesIO())
    )
    for name, value in states.named_parameters():
        assert torch.equal(value, true[name])


def reads_after_evaluation_are_refused() -> None:
    states = trained(4)
    with torch.no_grad():
        states.module(rows(9, 0))
    assert "is read outside" in error_of(states.module.layers[0].up.weight.sum)
    run_step(BEHAVIOUR, states, 2)


def one_rank_reads_alone(params: int, per_node: int) -> None:
    """A read is refused, or returns the values after the update, without the other ranks."""
    states = shard(built(BEHAVIOUR), params=params, ranks_per_node=per_node)
    run_step(BEHAVIOUR, states, 1)
    read, refusals = {}, 0
    for name, parameter in states.module.named_parameters() if dist.get_rank() == 0 else ():
        try:
            read[name] = parameter.clone()
        except TrainingError:
            refusals += 1
    true = dict(states.named_parameters())
    assert all(torch.equal(value, true[name]) for name, value in read.items())
    if dist.get_rank() == 0:
        assert refusals == (0 if params == 1 and per_node == RANKS else len(true))
    run_step(BEHAVIOUR, states, 2)


def not_a_number_changes_nothing() -> None:
    states = trained(2)
    before = {name: value.clone() for name, value in states.named_parameters()}
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    states.backward(mse(states.module, Batch(rows(5, 0), 5, 0)) * factor)
    assert not np.isfinite(states.step(0.1))
    for name, value in states.named_parameters():
        assert torch.equal(value, before[name])
    assert np.isfinite(run_step(BEHAVIOUR, states, 2)[1])


def modules_must_fit() -> None:
    mixed, lone = Net().bfloat16(), Net()
    mixed.layers[0].float()
    with torch.no_grad():
        lone.out.bias += dist.get_rank()
    for make, text in {
        lambda: shard(mixed): "parameters of one dtype on one device",
        lambda: shard(Net().double()): "module.float()",
        lambda: shard(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))): "module.float()",
        lambda: shard(nn.Embedding(4, 2, max_norm=1.0)): "use max_norm=None",
        lambda: shard(nn.Sequential()): "parameters of one dtype on one device",
        lambda: shard(Net(), params=3): "use divisors of 4",
        lambda: shard(Net(), params=2, grads=3): "use divisors of 4",
        lambda: shard(Net(), params=0): "use divisors of 4",
        lambda: shard(lone): "differ between ranks, first out.bias",
        lambda: AdamW(clip_norm=0.0): "use None for no limit",
        lambda: AdamW(clip_norm=float("nan")): "use None for no limit",
    }.items():
        torch.manual_seed(1)
        found = error_of(make)
        assert text in found, found


def passes_are_counted() -> None:
    states = trained(2)
    assert "after 0 of 1 calls" in error_of(lambda: states.step(0.1))
    states.backward(mse(states.module, Batch(rows(5, 0), 5, 0)))
    again = mse(states.module, Batch(rows(6, 0), 5, 0))
    assert "called 2 times in a step of 1" in error_of(lambda: states.backward(again))
    run_step(BEHAVIOUR, states, 2)
    with states.no_sync():
        states.backward(mse(states.module, Batch(rows(5, 0), 5, 0)))
    assert "after 1 of 2 calls" in error_of(lambda: states.step(0.1))
    states.drop_step()
    run_step(BEHAVIOUR, states, 3)


def set_new_weight(module: Net) -> None:
    module.inp.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "dtype": (lambda module: module.to(torch.bfloat16), "convert the module before shard"),
    "half": (lambda module: module.half(), "convert the module before shard"),
    "new parameter": (set_new_weight, "inp.weight would not be trained"),
    "new layer": (lambda m: m.layers.append(nn.Linear(2, 2)), "layers.3.weight would not"),
    "trainable": (lambda m: m.out.requires_grad_(True), "out.weight would not be trained"),
}


def module_must_stay(change: str, params: int) -> None:
    """A change after `shard` is refused: at once, or in the next step."""
    states = shard(built(Behaviour(lambda: Net(change=lambda net: net.out.requires_grad_(False)))),
                   params=params)  # fmt: skip
    run_step(BEHAVIOUR, states, 1)
    work, text = CHANGES[change]

    def change_and_train() -> None:
        work(states.module)
        run_step(BEHAVIOUR, states, 2)

    found = error_of(change_and_train)
    assert text in found or (params > 1 and "is read outside" in found), found


def loading_is_refused() -> None:
    states = trained(2)
    error = error_of(lambda: states.module.load_state_dict(built(BEHAVIOUR).state_dict()))
    assert "call load_state_dict of the result of shard" in error
    run_step(BEHAVIOUR, states, 2)


def writes_in_forward_are_refused() -> None:
    states = shard(built(BEHAVIOUR), params=2)

    def shrink(layer: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            next(layer.parameters()).mul_(0.5)

    states.module.layers[0].register_forward_pre_hook(shrink)
    error = error_of(lambda: [run_step(BEHAVIOUR, states, step) for step in (1, 2)])
    assert "were written to in a forward or backward pass" in error


def frozen_modules_compute(params: int) -> None:
    module = built(BEHAVIOUR).requires_grad_(False)
    expected = module(rows(1, 0))
    states = shard(module, params=params)
    assert torch.equal(states.module(rows(1, 0)), expected)
    for name, value in states.state_dict().items():
        assert torch.equal(value, built(BEHAVIOUR).state_dict()[name])


CHECKS: Mapping[str, tuple[Any, ...]] = {
    "reads before a step": (reads_are_refused, 0),
    "reads after a step": (reads_are_refused, 1),
    "reads after an evaluation": (reads_after_evaluation_are_refused,),
    **{
        f"one rank reads, params={case[0]}, {case[1]} per node": (one_rank_reads_alone, *case)
        for case in ((1, 4), (1, 2), (2, 2), (4, 4))
    },
    "not a number": (not_a_number_changes_nothing,),
    "modules": (modules_must_fit,),
    "number of passes": (passes_are_counted,),
    **{
        f"change: {change}, params={params}": (module_must_stay, change, params)
        for change in CHANGES
        for params in (1, 2)
    },
    "writes in forward": (writes_in_forward_are_refused,),
    "load_state_dict": (loading_is_refused,),
    "all frozen, params=1": (frozen_modules_compute, 1),
    "all frozen, params=2": (frozen_modules_compute, 2),
}  # fmt: skip


@functools.cache
def results() -> dict[str, tuple[str, ...]]:
    return on_one_start(attempt, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_refusals(check: str) -> None:
    for error in results()[check]:
        assert not error, error
