"""Run ranks as forked processes that may be killed, and report how each ended."""

import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import Limit, patient

HANGS_AFTER_SECONDS = 20
PATIENCE = timedelta(minutes=5)
_ALONE = "alone"
"""A file that tells rank 0 that all other processes have ended."""


def impatience() -> timedelta:
    """Return the time limit of a test in which a rank never arrives."""
    return timedelta(seconds=round(patient(0.5), 1))


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int
    """Exit code; negative: the signal."""
    result: Any
    """Return value of the function."""
    error: str
    """Type and message of the exception, or ""."""

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def run_crew(
    function: Callable[..., Any], size: int, *args: Any, store: str = "file"
) -> list[Outcome]:
    """Call `function(rank, size, store, *args)` in `size` processes, which may be killed.

    Args:
        function: function to run on each rank.
        size: number of processes.
        args: further arguments of the function.
        store: `file`, or `tcp` for a store in rank 0's process, which is lost with rank 0.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="crew_") as name:
        folder = Path(name)
        listener = socket.create_server(("127.0.0.1", 0))
        pids = []
        for rank in range(size):
            pid = os.fork()
            if not pid:
                _child(folder, listener, function, rank, size, store, args)
            pids.append(pid)
        listener.close()
        codes = _wait(pids, folder)
        return [_outcome(folder, rank, code) for rank, code in enumerate(codes)]


def _child(
    folder: Path,
    listener: socket.socket,
    function: Callable[..., Any],
    rank: int,
    size: int,
    kind: str,
    args: tuple[Any, ...],
) -> None:
    outcome: tuple[Any, str] = (None, "")
    try:
        torch.set_num_threads(1)
        store = _store(folder, listener, rank, size, kind)
        outcome = (function(rank, size, store, *args), "")
        while not rank and size > 1 and not (folder / _ALONE).exists():
            time.sleep(0.01)  # rank 0 may hold the store, so it exits last
    except BaseException as error:
        outcome = (outcome[0], f"{type(error).__name__}: {error}")
    finally:
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(outcome))
        os._exit(0)


def _store(folder: Path, listener: socket.socket, rank: int, size: int, kind: str) -> Any:
    if kind == "file":
        return dist.FileStore(str(folder / "store"), size)
    port = listener.getsockname()[1]
    options = {"master_listen_fd": listener.detach()} if rank == 0 else {}
    return dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False, **options)


def _wait(pids: list[int], folder: Path) -> list[int]:
    codes: dict[int, int] = {}
    limit = Limit(HANGS_AFTER_SECONDS)
    try:
        while len(codes) < len(pids):
            assert not limit.is_over, f"{len(pids) - len(codes)} processes hang"
            for pid in pids:
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
            if all(pid in codes for pid in pids[1:]):
                (folder / _ALONE).touch()
            time.sleep(0.005)
    finally:
        for pid in pids:
            if pid not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [codes[pid] for pid in pids]


def _outcome(folder: Path, rank: int, code: int) -> Outcome:
    file = folder / f"{rank}.pickle"
    if code:
        return Outcome(code, None, "")
    result, error = pickle.loads(file.read_bytes())
    return Outcome(code, result, error)
