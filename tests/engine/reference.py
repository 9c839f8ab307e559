"""Trains a module in one process with torch's AdamW, and on ranks with `shard`.

The process computes the loss of the samples of all ranks at once, except for behaviours where each
rank does something else. Then it adds up the losses of the ranks, divided by their number.
"""

import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state  # noqa: F401  (before each rank imports it)
from torch import nn
from torch.func import functional_call

from frontier_llm.launch.world import World
from frontier_llm.library import AdamW, Precision, Sharded, shard
from tests.engine.modules import Net
from tests.ranks import RanksFailedError, in_turn, run_ranks

Key = TypeVar("Key")
STEPS, RATE, ROWS, WIDTH, RANKS = 3, 1e-2, 4, 16, 4
EXACT = 1e-5


class Batch(NamedTuple):
    """The samples of one backward pass."""

    x: torch.Tensor
    step: int
    rank: int
    """0 if the samples are those of all ranks."""


def rows(step: int, rank: int, count: int = ROWS) -> torch.Tensor:
    """Return [count, WIDTH] samples of a rank; `step` may be any number."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, WIDTH, generator=generator)


def mse(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = (module(batch.x) - batch.x.roll(1, 1)).square().mean()
    return loss


def plain_backward(loss: torch.Tensor, states: Sharded | None) -> None:
    if states is None:
        loss.backward()
    else:
        states.backward(loss)


Before = Callable[[nn.Module, int, Sharded | None], object]


@dataclass(frozen=True)
class Behaviour:
    """What a training loop or a module does."""

    make: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Batch], torch.Tensor] = mse
    before: Before = lambda module, step, states: None
    """Called before each step, with None as states in one process."""
    backward: Callable[[torch.Tensor, Sharded | None], None] = plain_backward
    micro_batches: int = 1
    no_sync: bool = False
    """Whether all passes but the last lie in `no_sync`."""
    joint: bool = True
    """Whether one process computes the loss of all ranks at once."""
    rows: Callable[[int, int], torch.Tensor] = rows
    """Of a number of the batch, and a rank: its samples."""
    update: Callable[[nn.Module], AdamW] = lambda module: AdamW()
    precision: Precision | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `shard`."""
    refused: str = ""
    """Part of the error, if at least `together` ranks share parameters."""
    together: int = 2
    noise: Collection[str] = ()
    """Ends of the names of parameters whose true gradient is 0."""
    tolerance: float = EXACT


class Trained(NamedTuple):
    """What a training computed: the mean loss of each step, its norm, and the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


class Emulated(nn.Module):
    """Computes with copies of the parameters of another module in the dtype of a `Precision`."""

    def __init__(self, inner: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.inner, self.precision = inner, precision

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, casts = self.precision.param_dtype, self.precision.cast_forward_inputs
        copies = {name: value.to(dtype) for name, value in self.inner.named_parameters()}
        output: torch.Tensor = functional_call(self.inner, copies, (x.to(dtype) if casts else x,))
        return output.to(self.precision.output_dtype or output.dtype)


def built(behaviour: Behaviour) -> nn.Module:
    torch.manual_seed(1)
    return behaviour.make().train()


def in_one_process(behaviour: Behaviour) -> Trained:
    module = built(behaviour)
    called = Emulated(module, behaviour.precision) if behaviour.precision else module
    update = behaviour.update(module)
    optimizer = torch.optim.AdamW(
        _torch_groups(module, update), betas=(update.beta1, update.beta2), eps=update.epsilon
    )
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        behaviour.before(module, step, None)
        optimizer.zero_grad()
        total = 0.0
        for number in range(behaviour.micro_batches):
            parts = [behaviour.rows(10 * step + number, rank) for rank in range(RANKS)]
            parts = [torch.cat(parts)] if behaviour.joint else parts
            for rank, x in enumerate(parts):
                loss = behaviour.loss(called, Batch(x, step, rank))
                loss = loss / (len(parts) * behaviour.micro_batches)
                behaviour.backward(loss, None)
                total += float(loss.detach())
        given = [p for p in module.parameters() if p.grad is not None]
        limit = float("inf") if update.clip_norm is None else update.clip_norm
        norms.append(float(nn.utils.clip_grad_norm_(given, limit)))
        losses.append(total)
        optimizer.step()
    return Trained(losses, norms, {n: p.detach().clone() for n, p in module.named_parameters()})


def _torch_groups(module: nn.Module, update: AdamW) -> list[dict[str, Any]]:
    """Return a group of torch's optimizer for each parameter."""
    own = {id(p): group for group in update.groups for p in group.params}
    groups = []
    for parameter in module.parameters():
        settings = {"lr": RATE, "weight_decay": update.weight_decay if parameter.dim() > 1 else 0.0}
        if group := own.get(id(parameter)):
            settings["lr"] *= group.rate_factor
            if group.weight_decay is not None:
                settings["weight_decay"] = group.weight_decay
        groups.append({"params": [parameter], **settings})
    return groups


def sharded(behaviour: Behaviour, module: nn.Module, params: int) -> Sharded:
    """Shard a module over params=grads ranks; two ranks are a node if parameters are sharded."""
    settings = {
        "params": params,
        "micro_batches": 1 if behaviour.no_sync else behaviour.micro_batches,
        "ranks_per_node": 2 if params > 1 else None,
        "update": behaviour.update(module),
        "precision": behaviour.precision,
        **behaviour.settings,
    }
    return shard(module, **settings)


def run_step(behaviour: Behaviour, states: Sharded, step: int) -> tuple[float, float]:
    """Run a step of this rank; return the mean loss of all ranks, and the norm."""
    rank, total, last = dist.get_rank(), 0.0, behaviour.micro_batches - 1
    for number in range(behaviour.micro_batches):
        apart = behaviour.no_sync and number < last
        with states.no_sync() if apart else nullcontext():
            batch = Batch(behaviour.rows(10 * step + number, rank), step, rank)
            loss = behaviour.loss(states.module, batch)
            if behaviour.no_sync:
                loss = loss / behaviour.micro_batches
            behaviour.backward(loss, states)
        total += float(loss.detach()) / (1 if behaviour.no_sync else behaviour.micro_batches)
    mean = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / RANKS, states.step(RATE)


def on_ranks(behaviour: Behaviour, params: int) -> Trained:
    """Train on this rank, one of RANKS."""
    states = sharded(behaviour, built(behaviour), params)
    results = []
    for step in range(1, STEPS + 1):
        behaviour.before(states.module, step, states)
        results.append(run_step(behaviour, states, step))
    losses, norms = map(list, zip(*results, strict=True))
    if behaviour.precision:
        return Trained(losses, norms, masters(states))
    return Trained(losses, norms, {n: p.detach().clone() for n, p in states.named_parameters()})


def masters(states: Sharded) -> dict[str, torch.Tensor]:
    """Put the master weights of all ranks together. Collective over all ranks."""
    own = [(s.record.name, s.start, s.master.clone()) for s in states.states.shards()]
    shapes = {s.record.name: s.record.parameter.shape for s in states.states.shards()}
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, (own, shapes))
    whole: dict[str, torch.Tensor] = {}
    for parts, found in gathered:
        for name, start, part in parts:
            value = whole.setdefault(name, torch.full(found[name], torch.nan))
            value.view(-1)[start : start + len(part)] = part
    return whole


def outcome(world: World, behaviour: Behaviour, params: int) -> Trained | str:
    """Return what a rank trained, or the error that it raised."""
    try:
        return on_ranks(behaviour, params)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return text if behaviour.refused else f"{text}\n{traceback.format_exc()}"


def differences(behaviour: Behaviour, got: Trained, want: Trained) -> dict[str, float]:
    """Return how far losses, norms and weights differ, where it is more than the tolerance.

    Weights are compared relative to the update of each parameter.
    """
    first = {name: p.detach() for name, p in built(behaviour).named_parameters()}
    found = {
        "losses": _relative(torch.tensor(got.losses), torch.tensor(want.losses)),
        "norms": _relative(torch.tensor(got.norms), torch.tensor(want.norms)),
    }
    assert got.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        if not name.endswith(tuple(behaviour.noise)) or not behaviour.noise:
            moved = float((weight - first[name]).float().norm())
            error = float((got.weights[name] - weight).float().norm())
            found[name] = error / moved if moved else error
    return {name: value for name, value in found.items() if not value <= behaviour.tolerance}


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).abs() / want.abs().clamp(min=1e-12)).max())


def on_one_start(
    function: Callable[..., Any], cases: Mapping[Key, tuple[Any, ...]], timeout: float = 120
) -> dict[Key, tuple[Any, ...]]:
    """Call a function with the arguments of each case on RANKS ranks; return results by rank.

    If a rank dies or hangs, the result of all cases is the message about it.
    """
    try:
        by_rank = run_ranks(in_turn, RANKS, function, list(cases.values()), timeout=timeout)
    except RanksFailedError as error:
        return dict.fromkeys(cases, (str(error),))
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))


def attempt(world: World, check: Callable[..., object], *args: Any) -> str:
    """Run a check on this rank; return "", or the traceback of its error."""
    try:
        check(*args)
    except BaseException:
        return traceback.format_exc()
    return ""
