"""States that leave a sharded module, or come into it: state dicts, copies and checkpoints."""

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from frontier_llm.library import Checkpoints, Precision, Sharded, shard
from tests.engine.loops import BEHAVIOURS
from tests.engine.modules import Net, Tied
from tests.engine.reference import (
    EXACT,
    RANKS,
    RATE,
    STEPS,
    Batch,
    Behaviour,
    Trained,
    attempt,
    built,
    differences,
    in_one_process,
    masters,
    mse,
    on_one_start,
    rows,
    run_step,
    sharded,
)

pytestmark = pytest.mark.slow

PLAIN = Behaviour()
BFLOAT = Behaviour(precision=Precision(torch.bfloat16, torch.float32))


def other(make: Callable[[], nn.Module] = Net) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return make().state_dict()


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    assert got.keys() == want.keys()
    return all(torch.equal(value, want[name]) for name, value in got.items())


def norm_of(weights: dict[str, torch.Tensor], step: int) -> float:
    """Return the norm of the gradient of a step at these weights, in one process."""
    module = Net()
    module.load_state_dict(weights)
    x = torch.cat([rows(10 * step, rank) for rank in range(RANKS)])
    (module(x) - x.roll(1, 1)).square().mean().backward()
    return float(nn.utils.clip_grad_norm_(module.parameters(), 1.0))


def state_dict_is_current(behaviour: Behaviour) -> None:
    """The module's state dict has the values after the update, right after the step."""
    states = sharded(behaviour, built(behaviour), 1)
    for step in range(1, 4):
        run_step(behaviour, states, step)
        now = {name: value.clone() for name, value in states.module.state_dict().items()}
        dtype = next(iter(now.values())).dtype
        assert same(now, {name: value.to(dtype) for name, value in states.named_parameters()})
        assert same(now, {name: value.to(dtype) for name, value in masters(states).items()})


def loaded_weights_are_trained(behaviour: Behaviour) -> None:
    """`load_state_dict` of the module writes the masters, too."""
    states = sharded(behaviour, built(behaviour), 1)
    run_step(behaviour, states, 1)
    states.module.load_state_dict(other())
    dtype = torch.bfloat16 if behaviour.precision else torch.float32
    expected = {name: value.to(dtype).float() for name, value in other().items()}
    assert same(masters(states), expected)
    norm = run_step(behaviour, states, 2)[1]
    assert norm == pytest.approx(norm_of(expected, 2), rel=1e-2 if behaviour.precision else EXACT)
    for name, value in masters(states).items():
        assert 0 < (value - expected[name]).abs().max() < 3 * RATE, name


def states_move(params: int, to: int) -> None:
    """What `state_dict` returns loads into states of another layout, and names are the module's."""
    states = sharded(PLAIN, built(PLAIN), params)
    run_step(PLAIN, states, 1)
    state = states.state_dict()
    assert same(state, {name: value.clone() for name, value in states.named_parameters()})
    receiver = sharded(PLAIN, built(PLAIN), to)
    receiver.load_state_dict(state)
    assert same(receiver.state_dict(), state)
    assert same(masters(receiver), state)
    assert run_step(PLAIN, receiver, 2)[1] == pytest.approx(norm_of(state, 2), rel=EXACT)
    with pytest.raises(RuntimeError, match="Missing key"):
        receiver.load_state_dict({"inp.weight": state["inp.weight"]})
    run_step(PLAIN, receiver, 3)


def tied_weights_have_two_names() -> None:
    states = shard(built(Behaviour(Tied)), params=2)
    state = states.state_dict()
    assert torch.equal(state["table.weight"], state["head.weight"])
    states.load_state_dict(other(Tied))
    assert same(states.state_dict(), other(Tied))


def weights_of_fsdp2_load() -> None:
    module = Net()
    module.load_state_dict(other())
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    states = sharded(PLAIN, built(PLAIN), 2)
    states.load_state_dict(module.state_dict())
    assert same(states.state_dict(), other())


def copies_are_independent(params: int) -> None:
    """A copy trains with torch's optimizer, and its original does not notice."""
    states, twin = (sharded(PLAIN, built(PLAIN), params) for _ in range(2))
    for trained in (states, twin):
        run_step(PLAIN, trained, 1)
    with states.gathered():
        module = copy.deepcopy(states.module)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.cat([rows(20, rank) for rank in range(RANKS)])
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    mse(module, Batch(x, 2, 0)).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
    assert norm == pytest.approx(norm_of(weights, 2), rel=EXACT)
    optimizer.step()
    assert not same(module.state_dict(), weights)
    assert run_step(PLAIN, states, 2) == run_step(PLAIN, twin, 2)


def writes_are_kept(params: int) -> None:
    """What is written in `gathered` are the new weights and masters."""
    states = sharded(PLAIN, built(PLAIN), params)
    run_step(PLAIN, states, 1)
    before = masters(states)
    with states.gathered(), torch.no_grad():
        for parameter in states.module.parameters():
            parameter.mul_(0.5)
    halves = {name: value / 2 for name, value in before.items()}
    assert same(masters(states), halves)
    assert run_step(PLAIN, states, 2)[1] == pytest.approx(norm_of(halves, 2), rel=EXACT)


def resumed(name: str, params: int, to: int, at: int) -> None:
    """Train in one layout, save, and continue in another one, as one process does."""
    behaviour = BEHAVIOURS[name]
    folder = [Path(tempfile.mkdtemp()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    results: list[tuple[float, float]] = []
    for layout, first, last in ((params, 1, at), (to, at + 1, STEPS)):
        states = sharded(behaviour, built(behaviour), layout)
        checkpoints = Checkpoints(folder[0], states, every=at)
        assert checkpoints.restore() == first - 1
        for step in range(first, last + 1):
            behaviour.before(states.module, step, states)
            results.append(run_step(behaviour, states, step))
            checkpoints.save_if_due(step)
        checkpoints.close()
    losses, norms = map(list, zip(*results, strict=True))
    got = Trained(losses, norms, masters(states))
    assert differences(behaviour, got, in_one_process(behaviour)) == {}


class Buffers(Net):
    """Buffers of all kinds, which change in each forward pass, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(16)
        for name, value in {
            "calls": torch.tensor(2**40, dtype=torch.int64),
            "mask": torch.tensor([True, False, True]),
            "mean": torch.tensor([1e-300, 2.0], dtype=torch.float64),
            "lower": torch.full((3,), 0.1, dtype=torch.bfloat16),
            "empty": torch.zeros(0),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mask.logical_not_()
            self.mean *= 3
            self.lower -= 0.25
            self.scratch += 1
        return super().forward(self.batch_norm(x))


def buffers_are_saved() -> None:
    behaviour = Behaviour(Buffers)
    folder = [Path(tempfile.mkdtemp()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    states = sharded(behaviour, built(behaviour), 2)
    checkpoints = Checkpoints(folder[0], states, every=2)
    for step in (1, 2):
        run_step(behaviour, states, step)
        checkpoints.save_if_due(step)
    checkpoints.close()
    expected = [states.state_dict()]
    dist.broadcast_object_list(expected, src=0)
    restored = sharded(behaviour, built(behaviour), 4)
    assert Checkpoints(folder[0], restored).restore() == 2
    assert same(restored.state_dict(), expected[0])
    assert expected[0]["calls"] == 2**40 + 2
    assert restored.module.scratch.tolist() == [0.0, 0.0]


def evaluates_equally(params: int) -> None:
    states: Sharded = sharded(PLAIN, built(PLAIN), params)
    run_step(PLAIN, states, 1)
    module = Net()
    module.load_state_dict(states.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(states.module(rows(9, 0)), module(rows(9, 0)))


def two_modules_train(params: int) -> None:
    """Two modules whose passes alternate train as one that is alone."""
    both = [sharded(PLAIN, built(PLAIN), params) for _ in range(2)]
    norms: list[list[float]] = [[], []]
    for step in range(1, STEPS + 1):
        batch = Batch(rows(10 * step, dist.get_rank()), step, dist.get_rank())
        for states, loss in [(states, mse(states.module, batch)) for states in both]:
            states.backward(loss)
        for number, states in enumerate(both):
            norms[number].append(states.step(RATE))
    expected = in_one_process(PLAIN)
    for number, states in enumerate(both):
        got = Trained(expected.losses, norms[number], masters(states))
        assert differences(PLAIN, got, expected) == {}


CHECKS: dict[str, tuple[Any, ...]] = {
    "state_dict is current": (state_dict_is_current, PLAIN),
    "state_dict is current, bf16": (state_dict_is_current, BFLOAT),
    "load_state_dict": (loaded_weights_are_trained, PLAIN),
    "load_state_dict, bf16": (loaded_weights_are_trained, BFLOAT),
    "states from 1 to 4": (states_move, 1, 4),
    "states from 4 to 2": (states_move, 4, 2),
    "tied": (tied_weights_have_two_names,),
    "FSDP2": (weights_of_fsdp2_load,),
    "copies, params=1": (copies_are_independent, 1),
    "copies, params=4": (copies_are_independent, 4),
    "writes, params=1": (writes_are_kept, 1),
    "writes, params=2": (writes_are_kept, 2),
    "resumed with frozen parameters": (resumed, "frozen between steps", 2, 1, 2),
    "resumed with dropped layers": (resumed, "layers dropped", 1, 4, 2),
    "resumed with groups": (resumed, "groups of parameters", 4, 2, 1),
    "resumed in bf16": (resumed, "bf16", 2, 2, 2),
    "buffers": (buffers_are_saved,),
    "two modules": (two_modules_train, 2),
    "evaluation": (evaluates_equally, 4),
}


@functools.cache
def results() -> dict[str, tuple[str, ...]]:
    return on_one_start(attempt, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_states(check: str) -> None:
    for error in results()[check]:
        assert not error, error
