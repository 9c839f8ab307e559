"""DCP reads any box of any stored ranges, and what cannot be read or stored is refused by name."""

import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from frontier_llm.checkpoint.discovery import newest
from frontier_llm.checkpoint.folders import step_folder
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.checkpoint.restore import record_of_box
from frontier_llm.checkpoint.save import write_manifest
from frontier_llm.checkpoint.torch_dcp import Reader, Writer
from frontier_llm.checkpoint.write_plan import make_write_plan
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.launch.world import World
from frontier_llm.protocols import StateShard
from tests.properties import examples
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def shards_of(tensor: torch.Tensor, cuts: list[int]) -> Iterator[StateShard]:
    """Yield the ranges of a flattened tensor between cuts, with states that differ."""
    shape = tuple(tensor.shape)
    record = record_of_box("x", shape, (0,) * len(shape), shape)
    for first, stop in pairwise(sorted({0, *cuts, tensor.numel()})):
        values = tensor.flatten()[first:stop]
        yield StateShard(record, first, {"master": values, "exp_avg": -values})


def write_ranges(folder: Path, tensor: torch.Tensor, cuts: list[int]) -> None:
    """Write a checkpoint in which each range is the file of a rank."""
    records = []
    partial = folder / step_folder(1)
    for rank, part in enumerate(shards_of(tensor, cuts)):
        plan = make_write_plan([part], rank, 4096)
        with RankFile(partial / plan.name, plan.size) as file:
            for index in range(len(plan.chunks)):
                buffer = torch.zeros(2 * 4096, dtype=torch.uint8)
                buffer = buffer[-buffer.data_ptr() % 4096 :][:4096]
                plan.fill(index, buffer)
                file.write(buffer, plan.chunk_size(index))
            records.append(plan.record(file.finish()))
    write_manifest(partial, Manifest.merged(1, 4096, records, {"updates": 1}), 0)


def read_box(folder: Path, target: torch.Tensor, key: str, box: tuple[slice, ...]) -> None:
    """Fill a box of a tensor as DCP does if a rank has only this box."""
    reader, planner = Reader(folder), DefaultLoadPlanner()
    planner.set_up_planner({key: target}, reader.read_metadata(), is_coordinator=True)
    start = torch.Size(part.start for part in box)
    lengths = torch.Size(part.stop - part.start for part in box)
    index = MetadataIndex(key, torch.Size([0] * target.dim()))
    item = ReadItem(LoadItemType.TENSOR, index, start, index, start, lengths)
    reader.read_data(LoadPlan([item]), planner).wait()


@examples(30)
@given(st.data())
def test_any_box_is_read_from_any_ranges(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    shape = data.draw(st.lists(st.integers(1, 12), max_size=4).map(tuple))
    cuts = data.draw(st.lists(st.integers(0, prod(shape)), max_size=5))
    tensor = torch.arange(1.0, prod(shape) + 1).view(shape)
    write_ranges(folder, tensor, cuts)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    box = tuple(
        slice(start, data.draw(st.integers(start + 1, size)))
        for start, size in zip(starts, shape, strict=True)
    )
    for key, sign in (("model.x", 1), ("optim.state.x.exp_avg", -1)):
        target = torch.zeros(shape)
        read_box(folder, target, key, box)
        wanted = torch.zeros(shape)
        wanted[box] = sign * tensor[box]
        assert torch.equal(target, wanted)


def save_and_load_drawn(world: World, folder: Path, shapes: list[tuple[int, ...]]) -> None:
    """Save tensors that are sharded along the first dim, and load them along the last."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = {str(n): torch.arange(1.0, prod(s) + 1).view(s) for n, s in enumerate(shapes)}
    saved = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in whole.items()}
    dcp.save({"model": saved}, storage_writer=Writer(folder, 1))
    loaded = {
        name: distribute_tensor(0 * x, mesh, [Shard(x.dim() - 1)]) for name, x in whole.items()
    }
    dcp.load({"model": loaded}, storage_reader=Reader(folder))
    for name, tensor in whole.items():
        assert torch.equal(loaded[name].full_tensor(), tensor)


@examples(3)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1),
)
def test_drawn_tensors_are_sharded_anew(tmp_path_factory: Any, ranks: int, shapes: Any) -> None:
    run_ranks(save_and_load_drawn, ranks, tmp_path_factory.mktemp("drawn"), shapes)


def failure(states: dict[str, Any], **options: Any) -> Exception:
    """Return what a load or a save of this process raises."""
    with pytest.raises(CheckpointException) as caught:
        (dcp.load if "storage_reader" in options else dcp.save)(states, no_dist=True, **options)
    (error, _), *others = caught.value.failures.values()
    assert not others
    assert isinstance(error, Exception)
    return error


@pytest.fixture
def ranges(tmp_path: Path) -> Path:
    write_ranges(tmp_path, torch.arange(3000.0).view(50, 60), [1000])
    return tmp_path


def test_a_flipped_byte_is_refused_where_it_is_needed(ranges: Path) -> None:
    path = ranges / step_folder(1) / "rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the last first moment
    path.write_bytes(content)
    states = {"model": {"x": torch.zeros(50, 60)}}
    dcp.load(states, storage_reader=Reader(ranges), no_dist=True)
    assert torch.equal(states["model"]["x"], torch.arange(3000.0).view(50, 60))
    content[5000] ^= 1  # a weight
    path.write_bytes(content)
    error = failure(states, storage_reader=Reader(ranges))
    assert isinstance(error, CheckpointError)
    assert f"{path} is damaged: bytes 4096 to 8192" in str(error)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"rank_00001.safetensors is damaged: it has"):
        Reader(ranges)


def test_absent_and_other_tensors_are_named(ranges: Path) -> None:
    for key, shape, text in (
        ("y", (50, 60), "manifest.json has no model.y"),
        ("x", (60, 50), r"model.x is of shape \(50, 60\), the state dict wants .*60, 50"),
    ):
        error = failure({"model": {key: torch.zeros(shape)}}, storage_reader=Reader(ranges))
        assert isinstance(error, CheckpointError)
        assert re.search(text, str(error))
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no manifest.json"):
        Reader(ranges / "absent")


def test_states_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    x, one = torch.ones(3), torch.tensor(1.0)
    moments = {"exp_avg": x, "exp_avg_sq": x, "step": one}
    two = {"a": moments, "b": moments | {"step": one + 1}}
    for states, text in (
        ({}, "master (the weight)"),
        ({"model": {"a": x.long()}}, "master, torch.int64"),
        ({"rng": x}, "configuration error at rng"),
        ({"model": {"a": x}, "optim": {"state": {"a": {"exp_avg": x, "step": one}}}}, "'exp_avg'"),
        ({"optim": {"state": {"a": moments}}}, "states ['exp_avg', 'exp_avg_sq', 'step']"),
        ({"model": {"a": x}, "optim": {"state": {"a": moments | {"max": x}}}}, "'max'"),
        ({"model": {"a": x, "b": x}, "optim": {"state": two}}, "[1.0, 2.0]"),
        ({"model": {"a": x}, "config": {"kind": object}}, "a value that a Python literal"),
    ):
        error = failure(states, storage_writer=Writer(tmp_path, 5))
        assert isinstance(error, ConfigError)
        assert text in str(error)
        assert newest(tmp_path) is None
    state = {"model": {"a": x}, "optim": {"state": {"a": moments}}}
    assert "at most 0" in str(failure(state, storage_writer=Writer(tmp_path, 0)))
