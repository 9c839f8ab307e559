"""`Optimizer` follows schedulers as torch's AdamW does, and names what the engine cannot follow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from frontier_llm.errors import ConfigError
from frontier_llm.launch.world import World
from frontier_llm.library import AdamW, Checkpoints, Formats, Optimizer, ParameterGroup, shard
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RATE, STEPS = 1e-2, 6


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 16)])[0], nn.Linear(16, 1))


def loss_of(model: nn.Module, step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    """Return the mean loss of a part of 8 samples."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def schedule(optimizer: torch.optim.Optimizer, cycles: bool) -> Any:
    if cycles:
        return OneCycleLR(optimizer, [RATE, RATE / 4], STEPS, cycle_momentum=False)
    return LambdaLR(optimizer, lambda step: (step + 1) / STEPS)


def in_one_process(cycles: bool) -> list[float]:
    """Return the norms of torch's AdamW, with another learning rate for the last layer."""
    model, norms = model_of(), []
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters(), "lr": RATE / 4}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = schedule(optimizer, cycles)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        scheduler.step()
    return norms


def norms_of(world: World, cycles: bool) -> list[float]:
    model, norms = model_of(), []
    update = AdamW(weight_decay=0.0, groups=[ParameterGroup(model[2].parameters(), 0.25)])
    optimizer = Optimizer(shard(model, params=2, update=update), RATE)
    scheduler = schedule(optimizer, cycles)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, world.rank, world.size)
            loss.backward()
            return loss

        with torch.no_grad():
            loss = optimizer.step(closure)
        assert loss > 0
        norms.append(optimizer.norm)
        scheduler.step()
    return norms


@pytest.mark.parametrize("cycles", [False, True])
def test_groups_and_schedulers_give_the_norms_of_one_process(cycles: bool) -> None:
    for norms in run_ranks(norms_of, 2, cycles):
        assert norms == pytest.approx(in_one_process(cycles), rel=1e-5)


def quantised(world: World, folder: Path, last: int) -> list[float]:
    """Train until a step, from the newest checkpoint; return the norms of all steps."""
    formats = Formats(grads_across="int4", keep_errors=True)
    states = shard(model_of(), formats=formats, ranks_per_node=1)
    checkpoints = Checkpoints(folder, states, every=3)
    optimizer, norms = Optimizer(states, RATE, checkpoints), []
    for step in range(checkpoints.restore() + 1, last + 1):
        states.backward(loss_of(states.module, step, world.rank, world.size))
        optimizer.step()
        norms.append(optimizer.norm)
        checkpoints.save_if_due(step)
    checkpoints.close()
    return norms


def test_steps_that_are_saved_are_repeated_to_the_last_digit(tmp_path: Path) -> None:
    straight = run_ranks(quantised, 2, tmp_path / "straight", 5)[0]
    run_ranks(quantised, 2, tmp_path / "parts", 3)
    assert run_ranks(quantised, 2, tmp_path / "parts", 5)[0] == straight[3:]


def refused(world: World) -> tuple[str, dict[str, Any]]:
    model = model_of()
    update = AdamW(groups=[ParameterGroup(model[2].parameters(), 0.25)])
    optimizer = Optimizer(shard(model, update=update), RATE)
    stored = optimizer.state_dict()
    optimizer.param_groups[1]["lr"] *= 2
    loss_of(model, 1).backward()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    optimizer.load_state_dict(stored)
    optimizer.step()
    return str(caught.value), stored


def test_text_is_no_learning_rate_and_a_file_no_folder(tmp_path: Path) -> None:
    def mistakes(world: World) -> None:
        (tmp_path / "file").touch()
        states = shard(model_of())
        optimizer = Optimizer(states, RATE)
        loss_of(states.module, 1).backward()
        for mistake, named in (
            (lambda: optimizer.step("1e-3"), "closure"),  # type: ignore[arg-type]
            (lambda: states.step("1e-3"), "learning rate"),  # type: ignore[arg-type]
            (lambda: Optimizer(states, "1e-3"), "learning rate"),  # type: ignore[arg-type]
            (lambda: Checkpoints(tmp_path / "file", states), "folder"),
        ):
            with pytest.raises(ConfigError) as caught:
                mistake()
            assert caught.value.key == named
        optimizer.step()

    run_ranks(mistakes, 1)


def test_rates_of_another_ratio_are_refused_and_state_dicts_have_the_rates() -> None:
    text, stored = run_ranks(refused, 1)[0]
    assert "param_groups[1]['lr']" in text
    assert "factors of ParameterGroup" in text
    assert [group["lr"] for group in stored["param_groups"]] == [RATE, RATE / 4]
    assert stored["state"] == {}
