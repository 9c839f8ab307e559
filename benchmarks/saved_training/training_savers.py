"""The savers that checkpoint_in_training.py compares, for the states of a training run.

`ours` is the run's own manager. The savers of torch are those of bench_checkpoint.py. CheckFreq
and TorchSnapshot are added here. Every saver syncs its files, keeps one checkpoint, and lets one
save be unfinished at a time, except ours, which may begin the next one.
"""

import importlib
import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.checkpoint_savers import (
    TIMEOUT,
    Dcp,
    DcpAsync,
    Place,
    Saver,
    TorchSave,
)
from benchmarks.testbed.disk import sync_file
from frontier_llm.protocols import StateShard


class TrainedStates:
    """The states that one rank of a training run saves.

    Attributes:
        shards: the shards of the rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.shards: list[StateShard] = []

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """[elements] fp32 by a name that no other rank uses; only the peers need names."""
        return {
            f"{shard.record.name}.{shard.start}.{name}.{self._rank}": tensor
            for shard in self.shards
            for name, tensor in shard.tensors.items()
        }

    @property
    def size(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, shards: Iterable[StateShard]) -> None:
        """Take the shards that the run passes at a save."""
        self.shards = list(shards)
        self.__dict__.pop("tensors", None)


class TwoPhase(Saver):
    """A saver in two phases, like CheckFreq (Mohan et al., FAST 2021).

    The snapshot copies all states to host memory before training goes on. A thread then persists
    the copy with torch.save and fsync. The next snapshot waits for it.
    """

    def __init__(self, states: TrainedStates, place: Place) -> None:
        super().__init__(states, place)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for the thread only
        self._copies: dict[str, torch.Tensor] = {}
        self._path = place.folder / "none"
        self._thread: threading.Thread | None = None

    def save(self, step: int) -> None:
        """Copy the states, and start to write the copy."""
        self.settle()
        for name, tensor in self._states.tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor)
            self._copies[name].copy_(tensor)
        self._thread = threading.Thread(target=self._persist, args=(step,))
        self._thread.start()

    def settle(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def restore(self) -> None:
        """Read the file into new tensors and copy them to the states."""
        saved = torch.load(self._path, weights_only=True)
        for name, tensor in self._states.tensors.items():
            tensor.copy_(saved[name])

    def _persist(self, step: int) -> None:
        """Write this rank's file; when all ranks have theirs, delete the previous one."""
        previous = self._path
        self._path = self._place.folder / f"step_{step}_rank_{self._place.rank}.pt"
        torch.save(self._copies, self._path)
        sync_file(self._path)
        dist.barrier(self._group)
        previous.unlink(missing_ok=True)


class TorchSnapshot(Saver):
    """torchsnapshot.Snapshot.async_take, whose files a thread syncs when it has finished."""

    def __init__(self, states: TrainedStates, place: Place) -> None:
        super().__init__(states, place)
        self._module: Any = importlib.import_module("torchsnapshot")
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for the thread only
        self._path = place.folder / "none"
        self._thread: threading.Thread | None = None

    def save(self, step: int) -> None:
        """Copy the states, and start to write the copy."""
        self.settle()
        previous, self._path = self._path, self._place.folder / f"step_{step}"
        states = self._module.StateDict(**self._states.tensors)
        pending = self._module.Snapshot.async_take(str(self._path), {"states": states})

        def finish() -> None:
            pending.wait()
            files = sorted(path for path in self._path.rglob("*") if path.is_file())
            for path in files[self._place.rank :: self._place.ranks]:
                sync_file(path)
            dist.barrier(self._group)
            if self._place.rank == 0:
                shutil.rmtree(previous, ignore_errors=True)

        self._thread = threading.Thread(target=finish)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the files are synced."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def restore(self) -> None:
        """Read into new tensors and copy them to the states."""
        new = {name: torch.empty_like(tensor) for name, tensor in self._states.tensors.items()}
        states = self._module.StateDict(**new)
        self._module.Snapshot(str(self._path)).restore({"states": states})
        for name, tensor in self._states.tensors.items():
            tensor.copy_(states[name])


OURS, BASELINE = "ours", "torch.save"
"""The run's own saver, and the saver with which the targets compare it."""
PEERS: dict[str, Callable[[TrainedStates, Place], Saver]] = {
    "torch.save": lambda s, p: TorchSave(s, p, sync=True),
    "dcp": Dcp,
    "dcp-async": lambda s, p: DcpAsync(s, p, stager=False),
    "dcp-async-stager": lambda s, p: DcpAsync(s, p, stager=True),
    "two-phase": TwoPhase,
    "torchsnapshot": TorchSnapshot,
}
"""Constructor of each saver besides ours, by name."""
SAVERS = (OURS, *PEERS)
ASYNCHRONOUS = ("dcp-async", "dcp-async-stager", "two-phase", "torchsnapshot")
"""Peers that write while training continues."""


def missing_package(saver: str) -> str | None:
    """Return the package that a saver needs and that cannot be imported; None if there is none."""
    needs = saver == "torchsnapshot" and importlib.util.find_spec(saver) is None
    return saver if needs else None
