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
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.turn import SEED, MicroBatch, Peer, RankFigures, Turn
from benchmarks.testbed.forked import on_ranks
from benchmarks.testbed.sent_counter import tcp_sent_bytes
from frontier_lab.calibration.foreign_load import busy_seconds, idle_share
from frontier_llm.errors import LaunchError

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process receives when its parent ends."""
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
        turn, answer = Turn.from_json(line), dict[str, Any]()
        try:
            ranks = on_ranks(
                _run, turn.ranks, module, turn,
                namespaces=turn.namespaces, limit_seconds=turn.limit_seconds,
            )  # fmt: skip
            answer = {"ranks": [asdict(figures) for figures in ranks]}
        except LaunchError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def _run(rank: int, module: ModuleType, turn: Turn) -> RankFigures:
    """Build one rank of the contender, run its steps, and return its measurements."""
    _die_with_parent()
    torch.set_num_threads(turn.threads)
    start_bytes = _peak_bytes()
    peer: Peer = module.make(turn, rank)
    losses = [peer.step(_batches(turn, rank, index)) for index in range(turn.warmup)]
    # There is no barrier between steps. A step may leave work to the next step, which is then
    # counted there. The last warm-up step leaves as much work as the last timed step.
    seconds: list[float] = []
    begin, busy = time.perf_counter(), busy_seconds()
    for index in range(turn.warmup, turn.warmup + turn.steps):
        batches = _batches(turn, rank, index)
        start = time.perf_counter()
        losses.append(peer.step(batches))
        seconds.append(time.perf_counter() - start)
    idle = idle_share(busy_seconds() - busy, time.perf_counter() - begin)
    peak_bytes = _peak_bytes()
    return RankFigures(
        step_seconds=seconds,
        losses=losses,
        parameters=peer.parameters,
        start_bytes=start_bytes,
        peak_bytes=peak_bytes,
        sent_bytes=_count_sent(peer, turn, rank) if turn.namespaces else None,
        counted_bytes=peer.counted_bytes(),
        idle_share=idle,
    )


def _count_sent(peer: Peer, turn: Turn, rank: int) -> float:
    """Run one more step while nothing else is sent; return the bytes sent per rank of this node.

    Without what the kernel sent again: that depends on the load of the machine.
    """
    dist.barrier()
    before, resent = _settled_sent_bytes(), _resent_bytes()
    peer.step(_batches(turn, rank, turn.warmup + turn.steps))
    dist.barrier()
    sent = (_settled_sent_bytes() - before) / turn.ranks_per_interface
    return sent - (_resent_bytes() - resent)


def _resent_bytes() -> int:
    counted = tcp_sent_bytes()
    return counted.resent if counted else 0


def _settled_sent_bytes() -> int:
    """Wait until no more bytes are sent; return the bytes so far. Collective over all ranks."""
    last = -1
    while last != (last := _sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])):
        time.sleep(QUIET_SECONDS)
    dist.barrier()
    return last


def _sent_bytes(interface: str) -> int:
    """Return the bytes that all processes of this namespace have sent over an interface."""
    file = Path("/proc/self/net/dev")
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


def _batches(turn: Turn, rank: int, step: int) -> list[MicroBatch]:
    """Return random tokens that depend only on the step, the rank and the micro-batch."""
    first = SEED + (step * turn.ranks + rank) * turn.micro_batches
    batches = []
    for micro in range(turn.micro_batches):
        generator = torch.Generator().manual_seed(first + micro)
        size = (turn.samples, turn.shape.sequence + 1)
        rows = torch.randint(turn.shape.vocabulary, size, generator=generator)
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
