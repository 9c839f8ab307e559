"""A worker process of bench_sharding.py: imports one library, and forks the ranks of each turn.

    python -m benchmarks.peers.worker MODULE    # ours, torch_peers or deepspeed_peer

A turn is one timed run of a contender (turn.py). The worker reads turns from standard input, one
line of JSON each. It answers each turn with one line on standard output: {"ranks": [figures, ...]}
with the measurements of each rank, or {"error": text}. Output of the libraries goes to standard
error. The worker ends at the end of its input.
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

from benchmarks.peers.peer import SEED, MicroBatch, Peer
from benchmarks.peers.turn import RankFigures, Turn
from benchmarks.testbed.namespaces import enter
from benchmarks.testbed.sent_counter import tcp_sent_bytes
from frontier_llm.errors import FrontierError

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process receives when its parent ends."""
PATIENCE_SECONDS = 3.0
"""How long the other ranks may run after a rank has failed."""
QUIET_SECONDS = 0.05
"""If no byte is sent for this long, all messages are considered to have arrived."""
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss in bytes."""


def main() -> None:
    """Run turns until the end of the input."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to standard output now print to standard error
    module = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}")
    for line in sys.stdin:
        _run_turn(module, Turn.from_json(line), answers)


def _run_turn(module: ModuleType, turn: Turn, answers: TextIO) -> None:
    """Fork the ranks of a turn, wait for them, and write the answer."""
    with tempfile.TemporaryDirectory(prefix="bench_turn_") as name:
        folder = Path(name)
        pids = [_fork(module, turn, rank, folder) for rank in range(turn.ranks)]
        failure = _wait(pids, turn.limit_seconds)
        answer: dict[str, Any]
        if failure:
            answer = {"error": _cause(folder) or failure}
        else:
            files = [folder / f"{rank}.json" for rank in range(turn.ranks)]
            answer = {"ranks": [json.loads(file.read_text()) for file in files]}
    print(json.dumps(answer), file=answers, flush=True)


def _fork(module: ModuleType, turn: Turn, rank: int, folder: Path) -> int:
    """Fork a rank, which writes its result or its error to `folder`; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        _die_with_parent()
        figures = _run(module, turn, rank, folder)
        (folder / f"{rank}.json").write_text(json.dumps(asdict(figures)))
        dist.barrier()  # no rank may close its sockets while another one still reads from them
        exit_code = 0
    except FrontierError as error:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {error}")
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(exit_code)


def _run(module: ModuleType, turn: Turn, rank: int, folder: Path) -> RankFigures:
    """Build one rank of the contender, run its steps, and return its measurements."""
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
    # There is no barrier between steps. A step may leave work to the next step, which is then
    # counted there. The last warm-up step leaves as much work as the last timed step.
    seconds, ticks_before = [], _core_ticks()
    for index in range(turn.warmup, turn.warmup + turn.steps):
        batches = _batches(turn, rank, index)
        start = time.perf_counter()
        losses.append(peer.step(batches))
        seconds.append(time.perf_counter() - start)
    ticks_after = _core_ticks()
    peak_bytes = _peak_bytes()
    return RankFigures(
        step_seconds=tuple(seconds),
        losses=tuple(losses),
        parameters=peer.parameters,
        start_bytes=start_bytes,
        peak_bytes=peak_bytes,
        sent_bytes=_count_sent(peer, turn, rank, interface) if turn.namespaces else None,
        counted_bytes=peer.counted_bytes(),
        idle_share=idle_share(ticks_before, ticks_after),
    )


def _count_sent(peer: Peer, turn: Turn, rank: int, interface: str) -> float:
    """Run one more step while nothing else is sent; return the bytes sent per rank of this node.

    Without what the kernel sent again: that depends on the load of the machine.
    """
    dist.barrier()
    before, resent = _settled_sent_bytes(interface), _resent_bytes()
    peer.step(_batches(turn, rank, turn.warmup + turn.steps))
    dist.barrier()
    sent = (_settled_sent_bytes(interface) - before) / turn.ranks_per_interface
    return sent - (_resent_bytes() - resent)


def _resent_bytes() -> int:
    counted = tcp_sent_bytes()
    return counted.resent if counted else 0


def _settled_sent_bytes(interface: str) -> int:
    """Wait until no more bytes are sent; return the bytes so far. Collective over all ranks."""
    last = -1
    while last != (last := _sent_bytes(interface)):
        time.sleep(QUIET_SECONDS)
    dist.barrier()
    return last


def _enter(turn: Turn, rank: int) -> str:
    """Enter the network namespace of this rank, if it has one; return the interface to use."""
    interface = enter(turn.namespaces[rank] if turn.namespaces else None)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return interface


def _sent_bytes(interface: str) -> int:
    """Return the bytes that all processes of this namespace have sent over an interface."""
    file = Path("/proc/self/net/dev")
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def _core_ticks() -> list[int]:
    """Return the clock ticks that all cores have spent so far in each state; empty if unknown."""
    file = Path("/proc/stat")
    # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; the first two include guests
    return [int(tick) for tick in file.read_text().split()[1:9]] if file.exists() else []


def idle_share(before: list[int], after: list[int]) -> float | None:
    """Return the idle share of the cores' time between two readings; None if unknown.

    Args:
        before: result of `_core_ticks`.
        after: a later result.
    """
    ticks = [late - early for early, late in zip(before, after, strict=True)]
    idle = sum(ticks[3:5])  # idle and waiting for a disk
    return idle / sum(ticks) if sum(ticks) else None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


def _batches(turn: Turn, rank: int, step: int) -> list[MicroBatch]:
    """Return random tokens that depend only on the step, the rank and the micro-batch."""
    first = (step * turn.ranks + rank) * turn.micro_batches
    return [_batch(turn, SEED + first + micro) for micro in range(turn.micro_batches)]


def _batch(turn: Turn, seed: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    size = (turn.samples, turn.shape.sequence + 1)
    rows = torch.randint(turn.shape.vocabulary, size, generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _wait(pids: list[int], limit_seconds: float) -> str | None:
    """Wait for all ranks, and kill those that exceed the limit.

    Returns:
        The first failure in words; None if all ranks succeeded.
    """
    running = {pid: rank for rank, pid in enumerate(pids)}
    deadline, failure = time.monotonic() + limit_seconds, None
    try:
        while running and time.monotonic() < deadline:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                rank = running.pop(pid) if ended else None
                if status and not failure:
                    failure = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
                    deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
            time.sleep(0.01)
        return failure or (f"not done after {limit_seconds:.0f} s" if running else None)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _cause(folder: Path) -> str | None:
    """Return the traceback that was written first; the others follow from it."""
    errors = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    return errors[0].read_text() if errors else None


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
