"""Lazy checkpoints of sharded states, which any number of ranks can continue from."""

import logging
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import chain, starmap
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import Checkpoint, newest
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.rank_objects import gathered, opened_by_rank_0, tensor_names
from frontier_llm.checkpoint.read_plan import stored_tensor
from frontier_llm.checkpoint.restore import check_model, load, record_of_box
from frontier_llm.checkpoint.write_plan import part_of
from frontier_llm.engine.shard_settings import COUNT, POSITIVE, check_numbers
from frontier_llm.engine.sharded import Sharded
from frontier_llm.errors import CheckpointError, ConfigError, damaged_checkpoint
from frontier_llm.protocols import StateShard

_LOG = logging.getLogger(__name__)
PREFIX = "buffer:"
"""Begin of the names of persistent buffers in a checkpoint, such as means of batch norms."""


class Checkpoints:
    """Writes checkpoints of all ranks to one folder while training continues, and reads them.

    Args:
        folder: on a file system that all ranks share.
        sharded: the states to save.
        every: steps between two checkpoints.
        keep: number of newest checkpoints to keep.
        mode: `lazy`: a thread writes; `blocking`: saving returns when everything is on disk.
        timeout_seconds: how long a rank waits for the others after it has written its part.

    Attributes:
        meta: what `save` got as `meta` for the checkpoint that `restore` has read.
    """

    def __init__(
        self,
        folder: str | Path,
        sharded: Sharded,
        *,
        every: int = 100,
        keep: int = 2,
        mode: Literal["lazy", "blocking"] = "lazy",
        timeout_seconds: float = 600.0,
    ) -> None:
        self._folder, self._sharded, self._every = Path(folder), sharded, every
        check_numbers(*COUNT, every=every, keep=keep)
        check_numbers(*POSITIVE, timeout_seconds=timeout_seconds)
        if mode not in ("lazy", "blocking"):
            raise ConfigError("mode", repr(mode), "'lazy' or 'blocking'", "write one of them")
        if self._folder.exists() and not self._folder.is_dir():
            wants = "the folder of the checkpoints, which need not exist yet"
            raise ConfigError("folder", f"{folder}, a file", wants, "name a folder")
        self.meta: dict[str, Any] = {}
        factors = sharded.states.factors
        self._replica = factors.digits(dist.get_rank()).replica
        self._replicas = factors.data // factors.optimizer
        store = PrefixStore("frontier_llm", _get_default_store())
        timeout = timedelta(seconds=timeout_seconds)
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), store, timeout)
        self._manager = CheckpointManager(self._folder, ranks, mode, keep)
        sharded.before_update(self._manager.fence)

    def restore(self) -> int:
        """Load the newest checkpoint, which any number of ranks may have written.

        Return the step that it was saved after, or 0 if there is none. Collective over all ranks.
        Frozen parameters and buffers keep their values, with a warning, if they are not in a
        checkpoint of an older version or of FSDP2. Raises a CheckpointError if the checkpoint is
        damaged, or belongs to another module.
        """
        states = self._sharded.states
        own = tensor_names(chain(states.shards(), states.frozen_shards(writable=True)))
        opened = opened_by_rank_0(self._newest, own.union(persistent_buffers(self._sharded.module)))
        if opened is None:
            return 0
        checkpoint, folder = opened[0], opened[0].folder
        self._sharded.fence()
        states.settle()
        for error in filter(None, gathered(self._load(checkpoint))):
            raise error
        meta = checkpoint.manifest.meta
        updates, missed = meta.get("updates"), meta.get("missed", {})
        if not isinstance(updates, int) or not 0 <= updates <= checkpoint.step:
            raise damaged_checkpoint(f"{folder} is damaged at meta.updates: it is {updates!r}")
        if not isinstance(missed, dict) or not all(
            isinstance(count, int) and 0 <= count <= updates for count in missed.values()
        ):
            raise damaged_checkpoint(f"{folder} is damaged at meta.missed: it is {missed!r}")
        self._sharded.continue_from(checkpoint.step, updates, missed)
        self.meta = meta.get("user", {})
        return checkpoint.step

    def is_due(self, step: int) -> bool:
        """Whether `save_if_due` saves the states of this step."""
        return step % self._every == 0

    def save_if_due(self, step: int, meta: dict[str, Any] | None = None) -> None:
        """Save the states if this step is a multiple of `every`; see `save`."""
        if self.is_due(step):
            self.save(step, meta)

    def save(self, step: int, meta: dict[str, Any] | None = None) -> None:
        """Begin to write the states of all ranks, and the persistent buffers of rank 0.

        Collective over all ranks. `step` is the number of steps so far, `meta` plain JSON that is
        stored along, such as the position in the data. Raises a CheckpointError if the previous
        checkpoint failed.
        """
        states, buffers = self._sharded.states, persistent_buffers(self._sharded.module)
        shards: Iterable[StateShard] = chain(states.shards(), states.frozen_shards())
        shards = part_of(shards, self._replica, self._replicas)
        if dist.get_rank() == 0:
            shards = chain(shards, starmap(shard_of, buffers.items()))
        counts = {"updates": self._sharded.updates, "missed": self._sharded.missed}
        own = {"buffers": kinds_of(buffers), "user": meta or {}}
        self._manager.begin(step, shards, {**counts, **own})

    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint; CheckpointError if it is one of another module."""
        checkpoint = newest(self._folder)
        if checkpoint is None:
            return None
        module, buffers = self._sharded.module, persistent_buffers(self._sharded.module)
        stored, kinds = checkpoint.manifest.tensors, checkpoint.manifest.meta.get("buffers")
        known, names = {*kinds_of(buffers)}, set(stored)
        if kinds is not None and not isinstance(kinds, list):
            raise damaged_checkpoint(f"{checkpoint.folder} is damaged at meta.buffers: {kinds!r}")
        if kinds is not None:
            names = {name for name in stored if not name.startswith(PREFIX)}.union(map(str, kinds))
        else:  # FSDP2 stores buffers as parameters, and shared ones under all names
            known.update(dict(module.named_parameters(remove_duplicate=False)))
            known.update(dict(module.named_buffers(remove_duplicate=False)))
        units = self._sharded.states.all_units
        wanted = {r.name: u.is_trainable for u in units for r in u.records if r.parameter.numel()}
        wanted.update(dict.fromkeys(buffers, False))
        check_model(checkpoint.folder, names, known.union(wanted))
        absent = [name for name in wanted if name not in stored]
        for name in absent:
            if wanted[name] or kinds is not None:
                stored_tensor(checkpoint, name)  # raises the error
        if absent:
            text = "%s: %d frozen parameters or buffers are not restored from it, first %s"
            _LOG.warning(text, checkpoint.folder, len(absent), absent[0])
        return checkpoint

    def _load(self, checkpoint: Checkpoint) -> CheckpointError | None:
        """Load the states of this rank; return an error, which all ranks raise."""
        states, stored = self._sharded.states, checkpoint.manifest.tensors
        frozen = [s for s in states.frozen_shards(writable=True) if s.record.name in stored]
        factors = states.factors
        is_only_reader = factors.data == (factors.params if frozen else factors.optimizer)
        buffers = persistent_buffers(self._sharded.module).items()
        saved = [(shard_of(name, buffer), buffer) for name, buffer in buffers if name in stored]
        shards = chain(states.shards(writable=True), frozen, (shard for shard, _ in saved))
        try:
            load(checkpoint, shards, is_only_reader=is_only_reader)
        except CheckpointError as error:
            return error
        for shard, buffer in saved:
            write_back(shard, buffer)
        return None

    def take_stall_seconds(self) -> float:
        """Return how many seconds training has waited for checkpoints since the last call."""
        return self._manager.take_stall_seconds()

    def close(self) -> None:
        """Wait until the last checkpoint is committed; CheckpointError if it was not."""
        self._manager.close()


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return each buffer that is part of the state dict and is not empty, by its name in files."""
    kept = set[int]()
    for child in module.modules():
        names = child._buffers.keys() - child._non_persistent_buffers_set
        kept.update(id(child._buffers[name]) for name in names)
    named = module.named_buffers()
    return {f"{PREFIX}{name}": b for name, b in named if id(b) in kept and b.numel()}


def shard_of(name: str, buffer: torch.Tensor) -> StateShard:
    """Return a copy of a buffer's bytes as a state for a checkpoint.

    Files hold fp32 numbers, so the bytes of a buffer of any dtype are stored as if they were such.
    """
    data = buffer.detach().reshape(-1).view(torch.uint8)
    words = torch.zeros(-(-data.numel() // 4), dtype=torch.float32, device=buffer.device)
    words.view(torch.uint8)[: data.numel()].copy_(data)
    shape = tuple(words.shape)
    return StateShard(record_of_box(name, shape, (0,), shape), 0, {"bytes": words})


def kinds_of(buffers: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the name, the dtype and the shape of each buffer."""
    return [f"{name}, {b.dtype} {list(b.shape)}" for name, b in buffers.items()]


def write_back(shard: StateShard, buffer: torch.Tensor) -> None:
    """Set a buffer to bytes that were read from a checkpoint."""
    data = shard.tensors["bytes"].view(torch.uint8)[: buffer.nbytes]
    with torch.no_grad():
        buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
