"""A backend of torch.distributed that starts and fails as torch and NCCL document, for CPU tensors.

It is registered as `nccl_like`. Facts and sources; [P] is torch's `ProcessGroupNCCL.cpp` (releases
2.9 and 2.10, read in November 2026), whose constructors read all environment variables.

- The first collective of a group creates its communicator, and the first message between two ranks
  creates one of the pair ([P] `pointToPoint`). The lowest rank puts an identifier into the store
  for which the others wait, on the connection of the whole process (`broadcastUniqueNCCLID`). Then
  `ncclCommInitRank` returns when all members have called it. An abort does not reach it: the
  communicator is in no table yet ([P] `initNCCLComm`, `abortComms`).
- A collective only starts a kernel. If a member has died, the kernel ends when the communicator is
  aborted, `wait` raises no error, and the result is arbitrary ([P] `WorkNCCL::wait`). The next call
  on an aborted communicator raises DistBackendError.
- The watchdog of a group that finds an error sets the key `exception_dump` in the store without its
  prefixes, sleeps 4 x TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC (15,000), and ends the process, unless
  TORCH_NCCL_ASYNC_ERROR_HANDLING (3) is 0 or 2 ([P] `Watchdog::runLoop`, `handleException`).
- The heartbeat monitor of the first group of a process looks for this key unless
  TORCH_NCCL_DUMP_ON_TIMEOUT (1) is 0. Then it sleeps TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480) and
  ends the process if TORCH_NCCL_ENABLE_MONITORING (1) is not 0 and nothing has aborted or destroyed
  the group ([P] `HeartbeatMonitor::runLoop`). The destructor of a group waits for both threads.

Members find each other by files in `FOLDER`, which a test sets before it forks ranks. The kernel of
the system releases the lock of a file when its process dies. A second of torch's time limits is
`SECOND` here.
"""

import ctypes
import fcntl
import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "nccl_like"
FOLDER = Path()
SECOND = 0.001
ENDED = 134
"""Exit code of a process that torch ends: the code of SIGABRT in a shell."""
DUMP_KEY = "exception_dump"

_libc = ctypes.CDLL(None)
_held: list[int] = []  # descriptors of locked files, until the process ends
_groups = 0  # created by this process


def register() -> None:
    """Register the backend; to be called once, before ranks are forked."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(f"TORCH_NCCL_{name}", default))


class Communicator:
    """What its constructor returns only when all members have called it."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.aborted, self._sequence = folder, rank, False, 0
        self._peers = [folder / f"member{peer}" for peer in range(size) if peer != rank]
        folder.mkdir(parents=True, exist_ok=True)
        _held.append(os.open(folder / f"locked{rank}", os.O_CREAT | os.O_RDWR))
        fcntl.flock(_held[-1], fcntl.LOCK_EX)
        (folder / f"locked{rank}").rename(folder / f"member{rank}")
        while not all(peer.exists() for peer in self._peers):
            _libc.usleep(1000)

    def has_lost_member(self) -> bool:
        for peer in self._peers:
            with peer.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    continue
        return False

    def start(self, tensor: torch.Tensor, senders: set[int]) -> "Kernel":
        """Start to add up the tensors of `senders`, into the tensor of each rank."""
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        self._sequence += 1
        if self.rank in senders:
            part = self.folder / f"part{self.rank}"
            torch.save(tensor, part)
            part.rename(self.folder / f"{self._sequence}.{self.rank}")
        return Kernel(self, tensor, [self.folder / f"{self._sequence}.{rank}" for rank in senders])


class Kernel(dist.Work):
    """A collective that runs."""

    def __init__(self, on: Communicator, tensor: torch.Tensor, inputs: list[Path]) -> None:
        super().__init__()
        self.on, self._tensor, self._inputs, self._is_done = on, tensor, inputs, False

    def is_completed(self) -> bool:
        if not self._is_done and all(file.exists() for file in self._inputs):
            self._tensor.copy_(sum(torch.load(file) for file in self._inputs))
            self._is_done = True
        elif not self._is_done and self.on.aborted:
            self._tensor.fill_(-1)
            self._is_done = True
        return self._is_done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while not self.is_completed():
            time.sleep(0.001)
        return True


class NcclLike(dist.ProcessGroup):
    """A process group; its threads read the environment when it is created."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        global _groups
        self._store, self._whole = store, store
        while isinstance(self._whole, dist.PrefixStore):
            self._whole = self._whole.underlying_store
        self._communicators: dict[str, Communicator] = {}
        self._works: list[Kernel] = []
        self._should_dump, self._stopped = threading.Event(), threading.Event()
        self._handling = _variable("ASYNC_ERROR_HANDLING", 3)
        if _variable("DESYNC_DEBUG", 0) and not self._handling:
            self._handling = 3
        self._dump_seconds = 4 * _variable("WAIT_TIMEOUT_DUMP_MILSEC", 15_000) / 1000 * SECOND
        self._heartbeat_seconds = _variable("HEARTBEAT_TIMEOUT_SEC", 480) * SECOND
        self._is_monitored = bool(_variable("ENABLE_MONITORING", 1))
        threading.Thread(target=self._watch, daemon=True).start()
        if _groups == 0 and _variable("DUMP_ON_TIMEOUT", 1):
            threading.Thread(target=self._monitor, daemon=True).start()
        _groups += 1

    def _communicator(self, key: str, rank: int, size: int) -> Communicator:
        if key not in self._communicators:
            if rank == 0:
                self._store.set(key, uuid.uuid4().hex)
            name = self._store.get(key).decode()
            self._communicators[key] = Communicator(FOLDER / name, rank, size)
        return self._communicators[key]

    def _started(self, work: Kernel) -> Kernel:
        self._works.append(work)
        return work

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Kernel:
        on = self._communicator("all", self.rank(), self.size())
        return self._started(on.start(tensors[0], set(range(self.size()))))

    def _message(self, tensor: torch.Tensor, peer: int, *, sends: bool) -> Kernel:
        low, high = sorted((self.rank(), peer))
        own = int(self.rank() == high)
        on = self._communicator(f"{low}:{high}", own, 2)
        return self._started(on.start(tensor, {own if sends else 1 - own}))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Kernel:
        return self._message(tensors[0], peer, sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Kernel:
        return self._message(tensors[0], peer, sends=False)

    def abort(self) -> None:
        for communicator in self._communicators.values():
            communicator.aborted = True
        self._stopped.set()

    def shutdown(self) -> None:
        for work in self._works:
            work.wait()
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            works = self._works = [work for work in self._works if not work.is_completed()]
            if any(work.on.has_lost_member() for work in works):
                self._whole.set(DUMP_KEY, str(self.rank()))
                self._should_dump.set()
                time.sleep(self._dump_seconds)
                if self._handling in (1, 3):
                    os._exit(ENDED)
                return

    def _monitor(self) -> None:
        while not self._stopped.wait(SECOND * 10):
            try:
                found = self._should_dump.is_set() or self._whole.check([DUMP_KEY])
            except RuntimeError:
                continue
            if found:
                time.sleep(self._heartbeat_seconds)
                if self._is_monitored and not self._stopped.is_set():
                    os._exit(ENDED)
                return
