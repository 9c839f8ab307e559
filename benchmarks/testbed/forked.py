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
from frontier_llm.errors import FrontierError, LaunchError
from frontier_llm.launch.rendezvous import run_as_batch_work


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
            raise LaunchError(errors[0].read_text() if errors else failed)
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
        run_as_batch_work()
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
    except BaseException as error:
        cause = str(error) if isinstance(error, FrontierError) else traceback.format_exc()
        (folder / f"{rank}.error").write_text(f"rank {rank}: {cause}")
    finally:
        os._exit(exit_code)


def _wait(pids: Sequence[int], limit_seconds: float) -> str:
    """Wait for all ranks and kill those that exceed the limit; return the first failure in words.

    After a failure the other ranks may run for three more seconds.
    """
    running, failed = {pid: rank for rank, pid in enumerate(pids)}, ""
    deadline = time.monotonic() + limit_seconds
    try:
        while running and time.monotonic() < deadline:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                rank = running.pop(pid) if ended else None
                if status and not failed:
                    failed = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
                    deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.01)
        return failed or (f"not done after {limit_seconds:.0f} s" if running else "")
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
