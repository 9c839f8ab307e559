"""States that a model saves in one layout are restored bit by bit in every other layout."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _get_default_store

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import find
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.writer import Options
from frontier_llm.launch.world import World
from tests.checkpoint.crew import PATIENCE
from tests.checkpoint.states import STATES, assemble, restore
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.rig import Rig, make_rig
from tests.values import SIDES, T5GEMMA2, TINY_T5, tiny_values

pytestmark = pytest.mark.slow

MODEL = ("model.vocabulary=131", "model.activation=swiglu", "data.global_batch=4")
UNTIED = (
    "model.tied=false",
    "model.norm=rmsnorm",
    "model.positions=rotary",
    "model.bias=false",
    "model.qk_norm=width",
)
LAYOUTS: dict[str, tuple[int, int | None, tuple[str, ...]]] = {
    "one": (1, None, ()),
    "tensor2_zero1": (4, None, ("parallel.tensor=2", "sharding=zero1")),
    "pipeline2_folded_zero3": (
        4,
        None,
        ("parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zb_v", "sharding=zero3"),
    ),
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


EVERY, SOME = tuple(LAYOUTS), ("one", "pipeline2_folded_zero3", "tensor2_pipeline2_chunks2_amsp")
MODELS = {
    "tied": ((), SOME), "untied": (UNTIED, EVERY), "t5": (TINY_T5, SOME), "sides": (SIDES, SOME),
    "t5gemma2": (T5GEMMA2, ("one", "tensor2_pipeline2_chunks2_amsp")),
}  # fmt: skip
"""Overrides and layouts by model; every pair of its layouts is tested."""
COVERED = (
    ("tied", "pipeline2_folded_zero3"), ("tied", "tensor2_pipeline2_chunks2_amsp"),
    ("t5", "pipeline2_folded_zero3"), ("t5", "tensor2_pipeline2_chunks2_amsp"),
    ("untied", "tensor2_pipeline2"), ("sides", "pipeline2_folded_zero3"), ("tied", "one"),
    ("t5gemma2", "one"), ("t5gemma2", "tensor2_pipeline2_chunks2_amsp"), ("t5", "one"),
)  # fmt: skip
"""Layouts that load in exhaustive tests only: with another model, each of them always does."""
SHARED_FILES = ("tensor2_pipeline2_chunks2_amsp", "mics")
"""Layouts in which the ranks of a node write one file together."""


@dataclass(frozen=True)
class Saved:
    folder: Path
    model: tuple[str, ...]
    states: dict[str, dict[tuple[str, str], torch.Tensor]]
    next_loss: dict[str, float]
    """Loss of the step after the checkpoint in the run that saved it, by layout."""


def values_of(layout: str, model: tuple[str, ...]) -> tuple[int, int | None, dict[str, Any]]:
    size, per_node, overrides = LAYOUTS[layout]
    return size, per_node, tiny_values(*MODEL, *model, *overrides)


def collect(rig: Rig) -> list[Any]:
    """Return (name, state, box, values) of this rank's states; NaN where other ranks hold them."""
    found = []
    for shard in rig.states.shards():
        for state in STATES:
            flat = torch.full((shard.record.parameter.numel(),), float("nan"))
            run = shard.states[state]
            flat[shard.start : shard.start + run.numel()] = run
            local = flat.view(shard.record.parameter.shape)
            found += [
                (box.name, state, box, box.local_view(local).numpy().copy())
                for box in shard.record.placements
            ]
    return found


def train_and_save(
    world: World, folder: Path, values: dict[str, Any], shared_file: bool
) -> tuple[list[Any], float]:
    """Save after a step; return the saved states and the loss of the next step."""
    first = world.rank // world.ranks_per_node * world.ranks_per_node
    node = range(first, first + world.ranks_per_node)
    rig = make_rig(world, values)
    rig.train(1)
    saved = collect(rig)
    replica = rig.model.layout.factors.digits(rig.groups.coordinates.data).replica
    ranks = Ranks(world.rank, world.size, _get_default_store(), PATIENCE)
    options = Options(chunk_bytes=8192, file_ranks=node if shared_file else None)
    manager = CheckpointManager(folder, ranks, "lazy", 1, options)
    shards = list(rig.states.shards()) if replica == 0 else []
    manager.begin(1, shards, {"step": 1})
    manager.fence()
    loss = rig.train(1, first=1)[0].loss
    manager.close()
    dist.barrier()
    return saved, loss


def load_all(
    world: World, folder: Path, sources: Sequence[str], values: dict[str, Any]
) -> dict[str, tuple[list[Any], float | None]]:
    """Load the checkpoint of each source layout; train for a step after the first and the last.

    The step needs nothing of a checkpoint but the states, which are compared for every source.
    """
    rig = make_rig(world, {**values, "trainer": {**values["trainer"], "seed": 2}})
    found: dict[str, tuple[list[Any], float | None]] = {}
    for source in sources:
        rig.states.settle()
        for shard in rig.states.shards():
            for state in STATES:
                shard.states[state].fill_(-1)
        assert restore(folder / source, rig.states.shards()) == {"step": 1}
        states = collect(rig)
        rig.states.adopt(updates=1, step=1)
        is_trained = source in (sources[0], sources[-1])
        found[source] = states, rig.train(1, first=1)[0].loss if is_trained else None
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(tmp_path_factory.mktemp)


@pytest.fixture
def saved(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Saved:
    return save_all(request.param, folders(request.param))


@functools.cache
def save_all(name: str, folder: Path) -> Saved:
    """Save the checkpoints of a model once; pytest would forget them between two tests."""
    states, losses = {}, {}
    model, sources = MODELS[name]
    for source in sources:
        size, per_node, values = values_of(source, model)
        results = run_ranks(
            train_and_save, size, folder / source, values, source in SHARED_FILES,
            ranks_per_node=per_node,
        )  # fmt: skip
        states[source] = assemble([part for rank, _ in results for part in rank])
        losses[source] = results[0][1]
    return Saved(folder, model, states, losses)


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        pytest.param(
            model, target, marks=[pytest.mark.exhaustive] if (model, target) in COVERED else []
        )
        for model, (_, targets) in MODELS.items()
        for target in targets
    ],
    indirect=["saved"],
)
def test_each_layout_loads_the_checkpoints_of_all_layouts(target: str, saved: Saved) -> None:
    size, per_node, values = values_of(target, saved.model)
    results = run_ranks(
        load_all, size, saved.folder, tuple(saved.states), values, ranks_per_node=per_node
    )
    for source, expected in saved.states.items():
        found = assemble([part for rank in results for part in rank[source][0]])
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (source, key)
        losses = {rank[source][1] for rank in results} - {None}
        assert losses or source not in (*saved.states,)[:: len(saved.states) - 1]
        for loss in losses:
            assert loss == pytest.approx(saved.next_loss[source], rel=1e-5), source


@pytest.mark.parametrize("saved", ["untied"], indirect=True)
def test_ranks_of_a_node_write_one_plain_safetensors_file(saved: Saved) -> None:
    for source in SHARED_FILES:
        folder = saved.folder / source / "step_00000001"
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        assert names == sorted(find(folder).manifest.files)
        assert names[0] == "ranks_from_00000.safetensors"
        for name in names:
            assert load_file(folder / name)


@pytest.mark.parametrize("saved", covering(MODELS, ["tied", "t5", "t5gemma2"]), indirect=True)
def test_saved_states_are_not_zero(saved: Saved) -> None:
    """Zeros would make the comparison of layouts meaningless."""
    for states in saved.states.values():
        assert all(tensor.any() for (_, state), tensor in states.items() if state == "exp_avg_sq")
