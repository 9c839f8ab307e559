"""Read and write checkpoints with `torch.distributed.checkpoint` (DCP), for example from FSDP2.

    states = {"model": ..., "optim": ...}  # what get_state_dict(model, optimizer) returns
    dcp.save(states, storage_writer=Writer("checkpoints", step))
    dcp.load(states, storage_reader=Reader("checkpoints"))

`library.Checkpoints` restores what `Writer` writes, and `Reader` reads what both write, on any
number of ranks. `model.TENSOR` is the state `master` of TENSOR. `optim.state.TENSOR.exp_avg` and
`.exp_avg_sq` are states of the same names. `optim.state.TENSOR.step`, the same for all tensors, is
`updates` in the manifest's `meta`, and each value that is no tensor is a Python literal in `torch`
there. If modules share a parameter, `Checkpoints` stores it under its name in `named_parameters()`,
`Writer` under all names that it gets.

The constructors raise errors as they are. DCP wraps all others in a `CheckpointException`, whose
`failures` has the error of each rank.
"""

import ast
import io
import os
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from frontier_llm.checkpoint.chunk_pool import ChunkPool
from frontier_llm.checkpoint.discovery import find
from frontier_llm.checkpoint.folders import MANIFEST, partial_folder
from frontier_llm.checkpoint.manifest import Manifest, RankRecord, problems
from frontier_llm.checkpoint.restore import load, record_of_box
from frontier_llm.checkpoint.save import Task, check_files, publish, write_file, write_manifest
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.checkpoint.write_plan import make_write_plan
from frontier_llm.checkpoint.writer import DEFAULTS
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.protocols import StateShard

_STATES = ("master", "exp_avg", "exp_avg_sq")
"""States of AdamW, in the order in which files store them."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values fp32 stores exactly."""
_OPTIMIZER, _GROUPS = "optim.state.", "optim.param_groups."


class Reader(StorageReader):
    """Fills tensors and DTensors from a checkpoint of any number of ranks.

    A rank reads the chunks (16 MiB by default) that hold elements of its own shards, each chunk
    once, and compares their digests. `optim.param_groups` keeps its values if none are stored, as
    in checkpoints of `library.Checkpoints`. A CheckpointError is raised for a damaged file, another
    shape, and any other name that is not stored, also with the planner's `allow_partial_load`.
    Leave such names out of the state dict. After an error, some tensors may be overwritten.
    `checkpoint.step` is the number of steps so far.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the checkpoint of one step, or the newest of a folder of checkpoints."""
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Open a checkpoint, unless `checkpoint_id` is None; see the constructor."""
        if checkpoint_id is not None:
            self.checkpoint = find(Path(checkpoint_id))
            meta = self.checkpoint.manifest.meta
            self._updates: Any = meta.get("updates")
            self._values: dict[str, str] = meta.get("torch", {})

    def read_metadata(self, *args: Any, **kwargs: Any) -> md.Metadata:
        """Return the names and shapes of all stored states. Each tensor is one chunk for DCP."""
        stored = _Stored({key: md.BytesStorageMetadata() for key in self._values})
        stored.path = self.checkpoint.folder / MANIFEST
        stored.has_groups = any(key.startswith(_GROUPS) for key in self._values)
        for name, tensor in self.checkpoint.manifest.weights.items():
            for state in tensor.states:
                stored.add(_key(name, state), tensor.shape)
            if self._updates is not None and len(tensor.states) > 1:
                stored.add(_key(name, "step"), ())
        return md.Metadata(stored)

    def set_up_storage_reader(self, metadata: md.Metadata, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """Add the step that this rank has found."""
        return replace(plan, storage_data=self.checkpoint.step)

    def prepare_global_plan(self, all_plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Raise a CheckpointError if a step was committed after some ranks had opened another."""
        if len(steps := {plan.storage_data for plan in all_plans}) > 1:
            text = f"ranks have opened steps {sorted(steps)}\n  do: pass the folder of one step"
            raise CheckpointError(f"{self.checkpoint.folder.parent}: {text}")
        return all_plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank."""
        shards, filled = [], []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is plans.LoadItemType.BYTE_IO:
                if key in self._values:
                    torch.save(ast.literal_eval(self._values[key]), stream := io.BytesIO())
                    stream.seek(0)
                    planner.load_bytes(item, stream)
                continue
            target = planner.resolve_tensor(item).detach()
            values = target.reshape(-1)  # a copy if the elements are not contiguous
            filled.append((item, target, values))
            name, state = _parse(item.storage_index)
            if state == "step":
                values.fill_(self._updates)
                continue
            whole = self.checkpoint.manifest.tensors[name].shape
            record = record_of_box(name, whole, tuple(item.storage_offsets), tuple(item.lengths))
            shards.append(StateShard(record, 0, {state: values}))
        load(self.checkpoint, shards, is_only_reader=False)
        for item, target, values in filled:
            if values.data_ptr() != target.data_ptr():
                target.copy_(values.view(target.shape))
            planner.commit_tensor(item, target)
        done = Future[None]()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this may be a folder."""
        return not Path(checkpoint_id).is_file()


class Writer(StorageWriter):
    """Writes a checkpoint of AdamW's states.

    A tensor has all these states, or only the weights: a buffer, a frozen parameter or, if `optim`
    is absent, any parameter. `Checkpoints.restore` takes only frozen parameters of this kind.
    Tensors are of fp32, bf16 or fp16; the rank's tensors of 16 bits are copied to fp32 in memory.
    A ConfigError is raised for all that cannot be stored, and a CheckpointError if a file cannot be
    written, or if the shards of all ranks do not form whole tensors. After an error or a kill,
    `step_N.partial` may be left, which readers ignore. No older checkpoint is deleted.
    """

    def __init__(self, folder: str | Path, step: int) -> None:
        """Take the shared folder of all checkpoints; one of the same step is replaced."""
        self._folder, self._step = Path(folder), step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Choose another folder of all checkpoints."""
        self._folder = Path(checkpoint_id or self._folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise a ConfigError if `dcp.save` has `use_collectives=False`."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives", False, "True", "remove it: ranks commit together")

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, all_plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Check all tensors, and let one rank write all states of a shard that several hold."""
        found = [(rank, item) for rank, plan in enumerate(all_plans) for item in plan.items]
        found.sort(key=lambda pair: _parse(pair[1].index)[1] != "master")  # the weights first
        items: list[list[plans.WriteItem]] = [[] for _ in all_plans]
        writers: dict[Any, int] = {}
        states: dict[str, set[str]] = {}
        for rank, item in found:
            name, state = _parse(item.index)
            items[writers.setdefault((name, item.index.offset), rank)].append(item)
            if item.tensor_data is not None:
                dtype = item.tensor_data.properties.dtype
                kind = state if dtype in _DTYPES else f"{state}, {dtype}"
                states.setdefault(name, set()).add(kind)
        for name, kinds in states.items() or [("model", set[str]())]:
            if kinds not in ({"master"}, {*_STATES, "step"}):
                wants = f"master (the weight), or {', '.join(_STATES)}, step; in fp32, bf16 or fp16"
                todo = "save get_state_dict(model, optimizer) after a step of AdamW, others apart"
                raise ConfigError(name, f"states {sorted(kinds)}", wants, todo)
        return [replace(p, items=items[r], storage_data=r) for r, p in enumerate(all_plans)]

    def write_data(self, plan: plans.SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        boxes: dict[Any, dict[str, torch.Tensor]] = {}
        steps, literals = set[float](), dict[str, str]()
        for item in plan.items:
            data, (name, state) = planner.resolve_data(item), _parse(item.index)
            if isinstance(data, io.BytesIO):
                literals[item.index.fqn] = _literal(item.index.fqn, data)
            elif state == "step":
                steps.add(float(data))
            elif item.tensor_data is not None and data.numel():
                whole, chunk = item.tensor_data.size, item.tensor_data.chunk
                box = name, tuple(whole), tuple(chunk.offsets), tuple(chunk.sizes)
                boxes.setdefault(box, {})[state] = data.detach().float().reshape(-1)
        shards = [
            StateShard(record_of_box(*box), 0, {s: states[s] for s in _STATES if s in states})
            for box, states in boxes.items()
        ]
        rank, chunk_bytes = plan.storage_data, DEFAULTS.chunk_bytes
        layout = make_write_plan(shards, rank, chunk_bytes)
        task = Task(self._folder, self._step, {}, rank, layout, range(1), repeats=False)
        with closing(Snapshot(layout, ChunkPool(1, chunk_bytes, layout.device))) as source:
            record = layout.record(write_file(task, source)).to_json()
        done = Future[list[WriteResult]]()
        done.set_result([WriteResult(md.MetadataIndex(""), layout.size, (record, steps, literals))])
        return done

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and give the folder its final name. Rank 0 only."""
        written = [result.storage_data for of_rank in results for result in of_rank]
        steps = set[float]().union(*(steps for _, steps, _ in written)) or {0.0}
        if steps != {updates := int(max(steps))} or updates > self._step:
            wants = f"the same for all tensors, at most {self._step}, the step of Writer"
            todo = "update all parameters at each step, and pass the number of steps to Writer"
            raise ConfigError(_key("TENSOR", "step"), sorted(steps), wants, todo)
        literals = {key: text for _, _, found in written for key, text in found.items()}
        meta = {"updates": updates, "user": {}, "torch": literals}
        records = [RankRecord.model_validate_json(record) for record, _, _ in written]
        manifest = Manifest.merged(self._step, DEFAULTS.chunk_bytes, records, meta)
        partial = self._folder / partial_folder(self._step)
        for problem in problems(manifest):
            raise CheckpointError(f"{partial}: the shards do not form whole tensors: {problem}")
        check_files(partial, manifest.files)
        write_manifest(partial, manifest, 0)
        publish(self._folder, self._step)

    validate_checkpoint_id = Reader.validate_checkpoint_id


class _Stored(dict[str, Any]):
    """Metadata by name. A planner that asks for another name or shape gets a CheckpointError."""

    path: Path
    has_groups: bool

    def add(self, key: str, shape: tuple[int, ...]) -> None:
        chunk = md.ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        size: Any = _Shape(shape)
        size.where = f"{self.path}: {key}"
        self[key] = md.TensorStorageMetadata(md.TensorProperties(torch.float32), size, [chunk])

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key) or (not self.has_groups and str(key).startswith(_GROUPS)):
            return True
        raise CheckpointError(
            f"{self.path} has no {key}\n  do: load a checkpoint of this model; or leave it out of "
            "the state dict, for example a buffer or the second name of a parameter"
        )

    def __missing__(self, key: str) -> md.BytesStorageMetadata:
        return md.BytesStorageMetadata()


class _Shape(tuple[int, ...]):
    where: str

    def __ne__(self, other: object) -> bool:
        if tuple.__ne__(self, other):
            text = f"is of shape {tuple(self)}, the state dict wants {other}"
            raise CheckpointError(f"{self.where} {text}\n  do: load a checkpoint of this model")
        return False


def _key(tensor: str, state: str) -> str:
    return f"model.{tensor}" if state == "master" else f"{_OPTIMIZER}{tensor}.{state}"


def _parse(index: md.MetadataIndex) -> tuple[str, str]:
    """Return the tensor and the state that a name denotes; (name, "other") if it denotes none."""
    if index.fqn.startswith("model."):
        return index.fqn.removeprefix("model."), "master"
    tensor, _, state = index.fqn.removeprefix(_OPTIMIZER).rpartition(".")
    return (tensor, state) if index.fqn.startswith(_OPTIMIZER) else (index.fqn, "other")


def _literal(key: str, data: io.BytesIO) -> str:
    """Return a value as a Python literal; raise a ConfigError if none is equal to it."""
    data.seek(0)
    value = torch.load(data, weights_only=False)  # the planner has pickled it in this process
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    todo = "leave it out of the state dict, and save it elsewhere"
    raise ConfigError(key, repr(value)[:99], "a value that a Python literal can express", todo)
