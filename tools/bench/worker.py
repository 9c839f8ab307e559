"""A worker: imports one library, then forks the ranks of a turn as often as it is asked.

    python -m tools.bench.worker MODULE    # of tools/bench: ours, torch_peers, deepspeed_peer

Reads turns from standard input, a line of JSON each, and answers each with a line: {"ranks":
[figures, ...]} or {"error": text}. What libraries print goes to standard error. Needs torch and
what MODULE imports; ends when its input does.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
import torch.distributed as dist

from frontier_llm.errors import FrontierError
from tools.bench.namespaces import enter
from tools.bench.peer import SEED, MicroBatch, Peer
from tools.bench.turn import RankFigures, Turn

PR_SET_PDEATHSIG = 1
PATIENCE_SECONDS = 3.0
"""For the other ranks to end after one failed."""
QUIET_SECONDS = 0.05
"""Without a byte sent: what was under way has arrived."""
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss."""


def main() -> None:
    """Serve turns until the input ends."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"tools.bench.{sys.argv[1]}")
    for line in sys.stdin:
        _serve(module, Turn.from_json(line), answers)


def _serve(module: ModuleType, turn: Turn, answers: TextIO) -> None:
    with tempfile.TemporaryDirectory(prefix="bench_turn_") as name:
        folder = Path(name)
        pids = [_fork(module, turn, rank, folder) for rank in range(turn.ranks)]
        failed = _wait(pids, turn.limit_seconds)
        answer: dict[str, Any]
        if failed:
            answer = {"error": _cause(folder) or failed}
        else:
            files = [folder / f"{rank}.json" for rank in range(turn.ranks)]
            answer = {"ranks": [json.loads(file.read_text()) for file in files]}
    print(json.dumps(answer), file=answers, flush=True)


def _fork(module: ModuleType, turn: Turn, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with_parent()
        figures = _run(module, turn, rank, folder)
        (folder / f"{rank}.json").write_text(json.dumps(asdict(figures)))
        dist.barrier()  # nobody closes its sockets while another still reads from them
        code = 0
    except FrontierError as error:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {error}")
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(code)


def _run(module: ModuleType, turn: Turn, rank: int, folder: Path) -> RankFigures:
    interface = _enter(turn, rank)
    torch.set_num_threads(turn.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=turn.ranks,
        timeout=timedelta(seconds=turn.limit_seconds),
    )
    start_bytes = _peak_bytes()
    peer: Peer = module.make(turn, rank)
    losses = [peer.step(_batches(turn, rank, index)) for index in range(turn.warmup)]
    # No barrier: what a step leaves under way counts in the next one, so as much flows in at the
    # start of the timed steps as flows out at their end.
    seconds, cores_before = [], _core_ticks()
    for index in range(turn.warmup, turn.warmup + turn.steps):
        batches = _batches(turn, rank, index)
        start = time.perf_counter()
        losses.append(peer.step(batches))
        seconds.append(time.perf_counter() - start)
    cores_after = _core_ticks()
    peak_bytes = _peak_bytes()
    return RankFigures(
        step_seconds=tuple(seconds),
        losses=tuple(losses),
        parameters=peer.parameters,
        start_bytes=start_bytes,
        peak_bytes=peak_bytes,
        sent_bytes=_count_sent(peer, turn, rank, interface) if turn.namespaces else None,
        counted_bytes=peer.counted_bytes(),
        idle_share=idle_share(cores_before, cores_after),
    )


def _count_sent(peer: Peer, turn: Turn, rank: int, interface: str) -> float:
    """Make one more step, from quiet to quiet; return what a rank of this node sent in it."""
    dist.barrier()
    before = _quiet_sent_bytes(interface)
    peer.step(_batches(turn, rank, turn.warmup + turn.steps))
    dist.barrier()
    return (_quiet_sent_bytes(interface) - before) / turn.ranks_per_node


def _quiet_sent_bytes(interface: str) -> int:
    """Wait until nothing moves; return what was sent so far. All ranks wait alike."""
    last = -1
    while last != (last := _sent_bytes(interface)):
        time.sleep(QUIET_SECONDS)
    dist.barrier()
    return last


def _enter(turn: Turn, rank: int) -> str:
    """Enter this rank's network namespace, if it has one; return the interface to use."""
    interface = enter(turn.namespaces[rank] if turn.namespaces else None)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return interface


def _sent_bytes(interface: str) -> int:
    """Read what an interface has sent, of all processes in this namespace."""
    file = Path("/proc/self/net/dev")
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def _core_ticks() -> list[int]:
    """Read what all cores have done so far: ticks of each kind (Linux's proc(5), /proc/stat)."""
    file = Path("/proc/stat")
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in the first two already
    return [int(tick) for tick in file.read_text().split()[1:9]] if file.exists() else []


def idle_share(before: list[int], after: list[int]) -> float | None:
    """Return which share of the cores' time between two readings nobody used."""
    ticks = [late - early for early, late in zip(before, after, strict=True)]
    return sum(ticks[3:5]) / sum(ticks) if sum(ticks) else None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


def _batches(turn: Turn, rank: int, step: int) -> list[MicroBatch]:
    """Draw random tokens that depend on the step, the rank and the micro-batch alone."""
    first = (step * turn.ranks + rank) * turn.micro_batches
    return [_batch(turn, SEED + first + micro) for micro in range(turn.micro_batches)]


def _batch(turn: Turn, seed: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    size = (turn.samples, turn.shape.sequence + 1)
    rows = torch.randint(turn.shape.vocabulary, size, generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _wait(pids: list[int], limit_seconds: float) -> str | None:
    """Wait for all ranks; return why it went wrong. None outlives this call."""
    running = {pid: rank for rank, pid in enumerate(pids)}
    deadline, failed = time.monotonic() + limit_seconds, None
    try:
        while running and time.monotonic() < deadline:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                rank = running.pop(pid) if ended else None
                if status and not failed:
                    failed = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
                    deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
            time.sleep(0.01)
        return failed or (f"not done after {limit_seconds:.0f} s" if running else None)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _cause(folder: Path) -> str | None:
    """Return the traceback that was written first: the others are its echo."""
    errors = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    return errors[0].read_text() if errors else None


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
