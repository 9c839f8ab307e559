"""A model's states saved under one layout of the ranks come back under every other, bit by bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from frontier_llm.checkpoint.manager import CheckpointManager, Options
from frontier_llm.checkpoint.manifest import STATES
from frontier_llm.checkpoint.restore import restore
from frontier_llm.geometry.layout import resolve_factors
from frontier_llm.parallel.world import World
from tests.checkpoint.crew import PATIENCE
from tests.checkpoint.states import assemble
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.values import tiny_values

MODEL = ("model.vocabulary=131", "model.activation=swiglu", "data.global_batch=8")
UNTIED = ("model.tied=false", "model.norm=rmsnorm", "model.positions=rotary", "model.bias=false")
LAYOUTS: dict[str, tuple[int, int | None, tuple[str, ...]]] = {
    "one": (1, None, ()),
    "tensor2_zero1": (4, None, ("parallel.tensor=2", "sharding=zero1")),
    "pipeline2_zero3": (4, None, ("parallel.pipeline=2", "sharding=zero3")),
    "tensor2_pipeline2": (4, None, ("parallel.tensor=2", "parallel.pipeline=2")),
    "tensor2_pipeline2_chunks2_amsp": (
        8,
        None,
        (
            "parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2",
            "sharding.params=1", "sharding.grads=2", "sharding.optimizer=2",
        ),
    ),
    "mics": (4, 2, ("sharding=mics",)),
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    folder: Path
    model: tuple[str, ...]
    states: dict[str, dict[tuple[str, str], torch.Tensor]]


def values_of(layout: str, model: tuple[str, ...]) -> tuple[int, int | None, dict[str, Any]]:
    size, per_node, overrides = LAYOUTS[layout]
    return size, per_node, tiny_values(*MODEL, *model, *overrides)


def collect(rig: Rig) -> list[Any]:
    """Return this rank's part of the states: (name, state, box, values; NaN where others hold)."""
    found = []
    for shard in rig.states.shards():
        for state in STATES:
            flat = torch.full((shard.record.parameter.numel(),), float("nan"))
            run = getattr(shard, state)
            flat[shard.start : shard.start + run.numel()] = run
            local = flat.view(shard.record.parameter.shape)
            found += [
                (box.name, state, box, box.local_view(local).numpy().copy())
                for box in shard.record.placements
            ]
    return found


def train_and_save(world: World, folder: Path, values: dict[str, Any]) -> list[Any]:
    rig = make_rig(world, values)
    rig.train(1)
    saved = collect(rig)
    replica = resolve_factors(rig.config, rig.groups.grid).digits(rig.groups.at.data).d
    manager = CheckpointManager(
        folder, world.rank, world.size, _get_default_store(), "lazy", 1, PATIENCE,
        Options(chunk_bytes=8192),
    )  # fmt: skip
    shards = list(rig.states.shards()) if replica == 0 else []
    manager.begin(1, shards, {"step": 1})
    manager.fence()
    rig.train(1, first=1)
    manager.close()
    dist.barrier()
    return saved


def load_all(world: World, folder: Path, values: dict[str, Any]) -> dict[str, list[Any]]:
    """Load what every layout has saved, one after the other."""
    rig = make_rig(world, {**values, "trainer": {**values["trainer"], "seed": 2}})
    found = {}
    for source in LAYOUTS:
        for shard in rig.states.shards():
            for state in STATES:
                getattr(shard, state).fill_(-1)
        assert restore(folder / source, rig.states.shards()) == {"step": 1}
        found[source] = collect(rig)
    return found


@pytest.fixture(scope="module", params=[(), UNTIED], ids=["tied", "untied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    states = {}
    for source in LAYOUTS:
        size, per_node, values = values_of(source, request.param)
        results = run_ranks(train_and_save, size, folder / source, values, ranks_per_node=per_node)
        states[source] = assemble([piece for rank in results for piece in rank])
    return Saved(folder, request.param, states)


@pytest.mark.parametrize("target", LAYOUTS)
def test_it_reads_what_every_layout_saved(target: str, saved: Saved) -> None:
    size, per_node, values = values_of(target, saved.model)
    results = run_ranks(load_all, size, saved.folder, values, ranks_per_node=per_node)
    for source, expected in saved.states.items():
        found = assemble([piece for rank in results for piece in rank[source]])
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (source, key)


def test_states_were_trained(saved: Saved) -> None:
    """Else the comparison above would compare zeros."""
    for states in saved.states.values():
        assert all(tensor.any() for (_, state), tensor in states.items() if state == "exp_avg_sq")
