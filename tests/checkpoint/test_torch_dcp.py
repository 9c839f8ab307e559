"""FSDP2 continues what the library has saved, and the library what FSDP2 has saved with DCP."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from frontier_lab.stored_weights import read_tensor
from frontier_llm.checkpoint.discovery import Checkpoint, newest
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.kill_points import VARIABLE
from frontier_llm.checkpoint.torch_dcp import Reader, Writer
from frontier_llm.errors import CheckpointError
from frontier_llm.launch.world import World
from frontier_llm.library import AdamW, Checkpoints, Sharded, shard
from tests.covering import covering, exhaustive
from tests.ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.slow

STEPS, RATE, UPDATE = 3, 1e-2, AdamW()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(12), nn.Linear(12, 36)
        self.outputs = nn.Linear(12, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.inputs(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.outputs(mixed)


class Model(nn.Module):
    """A transformer whose table has a number of rows that no number of ranks divides."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(31, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(12, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Fsdp:
    """A training loop with FSDP2, or with a plain module on each rank."""

    def __init__(self, *, seed: int = 1, plain: bool = False) -> None:
        self.model = Model(seed)
        if not plain:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": UPDATE.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (UPDATE.beta1, UPDATE.beta2)
        self.optimizer = torch.optim.AdamW(groups, RATE, betas=betas, eps=UPDATE.epsilon)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            loss = self.model(own_tokens(step))
            loss.backward()
            assert UPDATE.clip_norm is not None
            nn.utils.clip_grad_norm_(self.model.parameters(), UPDATE.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(mean(loss))
        return losses

    def states(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load(self, folder: Path) -> None:
        states = self.states()
        dcp.load(states, storage_reader=Reader(folder))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optim"],
        )

    def whole(self) -> dict[str, torch.Tensor]:
        """Return all weights and states in full, and the numbers of updates."""
        states = self.states()
        named = {f"{name}.master": tensor for name, tensor in states["model"].items()}
        for name, found in states["optim"]["state"].items():
            named |= {f"{name}.{state}": tensor for state, tensor in found.items()}
        return {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
            .detach()
            .clone()
            for name, tensor in named.items()
        }


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(31, (8, 6), generator=torch.Generator().manual_seed(step))


def own_tokens(step: int) -> torch.Tensor:
    return tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(sharded: Sharded, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        loss = sharded.module(own_tokens(step))
        sharded.backward(loss)
        sharded.step(RATE)
        losses.append(mean(loss))
    return losses


def save_with_fsdp(world: World, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    fsdp = Fsdp()
    fsdp.train(1, STEPS)
    dcp.save(fsdp.states(), storage_writer=Writer(folder, STEPS))
    whole = fsdp.whole()
    return fsdp.train(STEPS + 1, 2 * STEPS), whole


def continue_with_the_library(world: World, folder: Path, params: int) -> list[float]:
    sharded = shard(Model(seed=2).train(), params=params, grads=params, update=UPDATE)
    assert Checkpoints(folder, sharded).restore() == STEPS
    return train(sharded, STEPS + 1, 2 * STEPS)


def continue_with_fsdp(
    world: World, folder: Path, plain: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    fsdp = Fsdp(seed=2, plain=plain)
    fsdp.load(folder)
    whole = fsdp.whole()
    return fsdp.train(STEPS + 1, 2 * STEPS), whole


@pytest.mark.parametrize("layouts", [[(4, 2)], *exhaustive(([(1, 1), (2, 1), (2, 2)],))], ids=str)
def test_the_library_continues_what_fsdp_has_saved(
    layouts: list[tuple[int, int]], tmp_path: Path
) -> None:
    losses, _ = run_ranks(save_with_fsdp, 2, tmp_path)[0]
    for ranks, params in layouts:
        found = run_ranks(continue_with_the_library, ranks, tmp_path, params)[0]
        assert found == pytest.approx(losses, rel=1e-6), (ranks, params)


def save_with_the_library(world: World, folder: Path) -> list[float]:
    sharded = shard(Model().train(), params=2, grads=2, update=UPDATE)
    checkpoints = Checkpoints(folder, sharded)
    train(sharded, 1, STEPS)
    checkpoints.save(STEPS)
    losses = train(sharded, STEPS + 1, 2 * STEPS)
    checkpoints.close()
    return losses


@pytest.mark.parametrize(
    "kinds", [[(1, True), (2, False)], *exhaustive(([(1, False), (4, False)],))], ids=str
)
def test_fsdp_continues_what_the_library_has_saved(
    kinds: list[tuple[int, bool]], tmp_path: Path
) -> None:
    losses = run_ranks(save_with_the_library, 4, tmp_path)[0]
    for ranks, plain in kinds:
        found, _ = run_ranks(continue_with_fsdp, ranks, tmp_path, plain)[0]
        assert found == pytest.approx(losses, rel=1e-6), (ranks, plain)


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        (4, (1, 2)),
        pytest.param(1, (4,), marks=pytest.mark.exhaustive),
        pytest.param(4, (4,), marks=pytest.mark.exhaustive),
        pytest.param(1, (1, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_fsdp_loads_exactly_what_it_has_saved_on_any_number_of_ranks(
    writers: int, readers: tuple[int, ...], tmp_path: Path
) -> None:
    _, saved = run_ranks(save_with_fsdp, writers, tmp_path)[0]
    assert newest(tmp_path).manifest.world == writers  # type: ignore[union-attr]
    for ranks in readers:
        _, loaded = run_ranks(continue_with_fsdp, ranks, tmp_path, False)[0]
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name


def save_replicas(world: World, folder: Path) -> dict[str, torch.Tensor]:
    loop = Fsdp(plain=True)
    for step in range(1, STEPS + 1):
        loop.model(tokens_of(step)).backward()  # all ranks have the same samples
        loop.optimizer.step()
    states = loop.states()
    states["scheduler"] = {"rates": [0.1, 1e-300], "kind": ("cosine", None, True)}
    states["model"] = {name: tensor.bfloat16() for name, tensor in states["model"].items()}
    dcp.save(states, storage_writer=Writer(folder, STEPS))
    dcp.save(states, storage_writer=Writer(folder, STEPS))  # replaces the first
    read: dict[str, Any] = {"scheduler": {"rates": [], "kind": ()}}
    dcp.load(read, storage_reader=Reader(folder))
    assert read["scheduler"] == states["scheduler"]
    whole = loop.whole()
    return {
        name: tensor.bfloat16().float() if name.endswith("master") else tensor
        for name, tensor in whole.items()
    }


def test_replicas_share_the_work_and_values_of_all_kinds_return(tmp_path: Path) -> None:
    whole = run_ranks(save_replicas, 2, tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == [step_folder(STEPS)]
    checkpoint = Checkpoint.open(tmp_path / step_folder(STEPS))
    assert min(file.size for file in checkpoint.manifest.files.values()) > 4096
    assert checkpoint.manifest.meta["updates"] == STEPS
    for name in checkpoint.manifest.tensors:
        for state, tensor in read_tensor(checkpoint, name).items():
            assert torch.equal(tensor, whole[f"{name}.{state}"]), (name, state)


def restore_weights_only(world: World, folder: Path) -> str:
    dcp.save({"model": Model().state_dict()}, storage_writer=Writer(folder, 1))
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder, shard(Model().train())).restore()
    return str(caught.value)


def test_training_does_not_continue_from_weights_alone(tmp_path: Path) -> None:
    assert "has no state exp_avg, only master" in run_ranks(restore_weights_only, 1, tmp_path)[0]


def save_twice(world: World, folder: Path, kill_at: str) -> None:
    fsdp = Fsdp()
    for step in (1, 2):
        fsdp.train(step, step)
        if step == 2:
            os.environ[VARIABLE] = kill_at
        dcp.save(fsdp.states(), storage_writer=Writer(folder, step))


@pytest.mark.parametrize("kill_at", covering(["file.half@1", "manifest.synced"], ["file.half@1"]))
def test_a_killed_save_leaves_the_one_before(kill_at: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"signal"):
        run_ranks(save_twice, 2, tmp_path, kill_at)
    assert (tmp_path / "step_00000002.partial").is_dir()
    assert Reader(tmp_path).checkpoint.step == 1
    run_ranks(save_twice, 2, tmp_path, "")
    assert Reader(tmp_path).checkpoint.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_folder(1), step_folder(2)]
