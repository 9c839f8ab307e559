"""Call a function on forked gloo ranks, each in the network namespace of its simulated node."""

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.namespaces import enter
from frontier_llm.errors import LaunchError


def on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    namespaces: Sequence[str] = (),
    limit_seconds: float = 300,
) -> list[Any]:
    """Call `function(rank, *arguments)` on forked ranks; return the results by rank.

    Args:
        function: its first argument is the number of the rank; its result must be picklable.
        ranks: number of ranks.
        arguments: further arguments, the same on every rank.
        namespaces: network namespace of each rank; empty: all ranks use the loopback interface.
        limit_seconds: time limit after which the ranks are killed.

    Raises:
        LaunchError: a rank failed or did not end in time; the message has the first traceback.
    """
    torch.set_num_threads(1)  # a process with a thread pool must not fork
    with tempfile.TemporaryDirectory(prefix="bench_ranks_") as name:
        folder = Path(name)
        places: Sequence[str | None] = namespaces or [None] * ranks
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                _run_rank(function, rank, places, folder, arguments)
            pids.append(pid)
        failed = _wait(pids, limit_seconds)
        if failed:
            errors = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
            raise LaunchError(errors[0].read_text() if errors else "a rank did not end")
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(ranks)]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    places: Sequence[str | None],
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    """Run as a rank: write the result or the traceback to `folder`, then exit."""
    exit_code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.environ["GLOO_SOCKET_IFNAME"] = enter(places[rank])
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=len(places),
            timeout=timedelta(seconds=120),
        )
        (folder / f"{rank}.result").write_bytes(pickle.dumps(function(rank, *arguments)))
        dist.barrier()  # no rank may close its sockets while another one still reads from them
        exit_code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(exit_code)


def _wait(pids: Sequence[int], limit_seconds: float) -> bool:
    """Wait for all ranks and kill those that exceed the limit; return whether a rank failed.

    After a failure the other ranks may run for three more seconds.
    """
    running, failed = set(pids), False
    deadline = time.monotonic() + limit_seconds
    try:
        while running and time.monotonic() < deadline:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                if status and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + 3)
            time.sleep(0.01)
        return failed or bool(running)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
