"""Any sharding loads checkpoints of any other and reads only needed bytes; mismatches fail."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from frontier_lab.stored_weights import read_tensor
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import Checkpoint, newest
from frontier_llm.checkpoint.folders import MANIFEST
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manifest import Manifest, SplitManifest
from frontier_llm.checkpoint.rank_objects import tensor_names
from frontier_llm.checkpoint.restore import check_model, load
from frontier_llm.checkpoint.writer import Options
from frontier_llm.errors import CheckpointError
from frontier_llm.protocols import Placement, StateShard
from tests.checkpoint.crew import PATIENCE, run_crew
from tests.checkpoint.states import MODEL, STATES, States, restore, value
from tests.covering import covering

SMALL = Options(chunk_bytes=4096)
CUTS = [(1, 1), (2, 1), (1, 3), (2, 2), (4, 1), (3, 2)]


def save(rank: int, size: int, store: Any, folder: Path, tensor: int, data: int) -> None:
    states = States(tensor, data, rank)
    states.advance(4)
    manager = CheckpointManager(folder, Ranks(rank, size, store, PATIENCE), "blocking", 1, SMALL)
    manager.begin(4, states.shards, {"of": "test"})


def checkpoint_of(folder: Path, tensor: int = 1, data: int = 1) -> Checkpoint:
    outcomes = run_crew(save, tensor * data, folder, tensor, data)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    return newest(folder)


@pytest.mark.parametrize("verify", covering([True, False], [False]))
@pytest.mark.parametrize(("tensor", "data"), CUTS)
def test_any_layout_loads_any_other(tensor: int, data: int, verify: bool, tmp_path: Path) -> None:
    """Sizes do not divide evenly: 101 rows over 4 ranks, and ranges that end inside rows."""
    checkpoint = checkpoint_of(tmp_path, tensor, data)
    for other_tensor, other_data in CUTS:
        for rank in range(other_tensor * other_data):
            states = States(other_tensor, other_data, rank)
            load(checkpoint, states.shards, verify, is_only_reader=rank % 2 == 0)
            assert not states.wrong(4)


@pytest.mark.parametrize("name", MODEL)
def test_read_tensor_returns_the_whole_tensor(name: str, tmp_path: Path) -> None:
    tensors = read_tensor(checkpoint_of(tmp_path, 2, 2), name)
    assert tensors.keys() == set(STATES)
    for state, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), value(name, state, 4))


def test_a_rank_needs_only_its_part_of_the_manifest(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, 2, 2)
    manifest = checkpoint.manifest
    split = SplitManifest.of(manifest)
    assert split.weights == manifest.weights.keys()
    assert split.part(manifest.tensors) == manifest
    for rank in range(3):
        states = States(3, 1, rank)
        shards = states.shards[rank : rank + 1]
        part = split.part([*tensor_names(shards), "absent"])
        assert part.tensors.keys() == tensor_names(shards)
        ranges = [r for tensor in part.tensors.values() for r in tensor.stored_ranges]
        assert part.files.keys() == {r.file for r in ranges}
        load(Checkpoint(checkpoint.folder, part), shards)
        name = shards[0].record.placements[0].name
        assert [text for text in states.wrong(4) if name in str(text)] == []
    nothing = split.part([])
    assert (nothing.tensors, nothing.files, nothing.meta) == ({}, {}, manifest.meta)


def test_padding_is_not_changed(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    states = States(tensor=2, rank=1)
    load(checkpoint, states.shards)
    tokens = states.shards[0].master.view(51, 24)
    assert (tokens[-1] == -1).all()
    assert (tokens[:-1] != -1).all()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of every read is appended."""
    counted: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        counted.append(preadv(fd, buffers, offset))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counted


def test_only_needed_bytes_are_read(tmp_path: Path, reads: list[int]) -> None:
    """A rank of 40 reads a fortieth; with verification at most two chunks per range."""
    checkpoint = checkpoint_of(tmp_path, 1, 2)
    states = States(data=40, rank=7)
    states.shards = [s for s in states.shards if s.record.name == "embedding.tokens.weight"]
    wanted = 3 * 4 * states.shards[0].master.numel()
    load(checkpoint, states.shards, verify=False)
    # whole pages are read, of which the first and the last may be wanted only in part
    assert wanted <= sum(reads) <= wanted + 3 * 2 * 4096
    reads.clear()
    load(checkpoint, states.shards, verify=True)
    assert sum(reads) <= 3 * 2 * 4096
    assert not states.wrong(4)


def test_elements_stored_several_times_are_read_once(tmp_path: Path, reads: list[int]) -> None:
    checkpoint = checkpoint_of(tmp_path, 1, 2)
    states = States()
    load(checkpoint, states.shards)
    once = sum(reads)
    tensors = {
        name: tensor.model_copy(update={"stored_ranges": tensor.stored_ranges * 2})
        for name, tensor in checkpoint.manifest.tensors.items()
    }
    twice = checkpoint.manifest.model_copy(update={"tensors": tensors})
    with pytest.raises(CheckpointError, match="stored more than once"):
        load(Checkpoint(checkpoint.folder, twice), states.shards)
    reads.clear()
    states = States()
    node = twice.model_copy(update={"repeats": True})
    load(Checkpoint(checkpoint.folder, node), states.shards)
    assert not states.wrong(4)
    assert sum(reads) == once


def test_an_unverified_load_changes_only_the_damaged_state(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    path = checkpoint.folder / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 255  # the last second moment of the last tensor
    path.write_bytes(content)
    states = States()
    load(checkpoint, states.shards, verify=False)
    assert states.wrong(4) == ["final_norm.weight exp_avg_sq"]


def renamed(shard: StateShard, **changes: Any) -> StateShard:
    box = replace(shard.record.placements[0], **changes)
    return replace(shard, record=replace(shard.record, placements=(box,)))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint_of(tmp_path)
    states = States()
    with pytest.raises(CheckpointError, match=r"layers\.7\.x is absent; is it a checkpoint of an"):
        restore(tmp_path, [renamed(states.shards[1], name="layers.7.x")])
    with pytest.raises(
        CheckpointError, match=r"up\.weight is of shape \[48, 24\], the model wants \[96, 24\]"
    ):
        restore(tmp_path, [renamed(states.shards[1], global_shape=(96, 24))])
    smaller = {name: shape for name, shape in MODEL.items() if not name.startswith("layers.1")}
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.up\.weight is stored, the model"):
        check_model(tmp_path, newest(tmp_path).manifest.weights, smaller)
    check_model(tmp_path, newest(tmp_path).manifest.weights, MODEL)


def test_elements_that_are_not_stored_exactly_once_are_refused(tmp_path: Path) -> None:
    """A manifest is checked when it is read, and again when copies are planned."""
    whole = checkpoint_of(tmp_path, 2, 1)
    name, states = "layers.0.ffn.up.weight", States()
    changes: dict[str, Any] = {
        r"576 of 1152 elements of layers\.0\.ffn\.up\.wei": lambda ranges: ranges[1:],
        r"layers\.0\.ffn\.up\.weight are stored more than": lambda ranges: (*ranges, ranges[0]),
    }
    for message, change in changes.items():
        tensor = whole.manifest.tensors[name]
        changed = tensor.model_copy(update={"stored_ranges": change(tensor.stored_ranges)})
        tensors = {**whole.manifest.tensors, name: changed}
        manifest = whole.manifest.model_copy(update={"tensors": tensors})
        with pytest.raises(CheckpointError, match=message):
            load(replace(whole, manifest=manifest), states.shards)
        (whole.folder / MANIFEST).write_bytes(manifest.to_bytes())
        with pytest.raises(CheckpointError, match=r"is damaged at tensors\.layers\.0"):
            Manifest.load(whole.folder)


def test_a_scalar_tensor_is_restored(tmp_path: Path) -> None:
    record = replace(
        States().shards[0].record,
        parameter=torch.nn.Parameter(torch.empty((), device="meta")),
        placements=(Placement("scalar", (), (), (), ()),),
    )
    shard = StateShard(
        record, 0, {state: torch.tensor([5.0 + i]) for i, state in enumerate(STATES)}
    )
    ranks = Ranks(0, 1, dist.HashStore(), PATIENCE)
    manager = CheckpointManager(tmp_path, ranks, "blocking", 1, SMALL)
    manager.begin(1, [shard], {})
    for state in STATES:
        shard.states[state].zero_()
    restore(tmp_path, [shard])
    assert [shard.states[state].item() for state in STATES] == [5, 6, 7]
