"""Measure latency and bandwidth between ranks of this machine, with all-gathers."""

import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from frontier_llm.errors import LaunchError
from frontier_llm.geometry.wire import gather_bytes

SMALL_ELEMENTS, LARGE_ELEMENTS = 1, 1 << 22
"""Elements that each rank contributes to a small and to a large all-gather: 4 bytes and 16 MiB."""
CALLS = {SMALL_ELEMENTS: 200, LARGE_ELEMENTS: 5}
"""Number of measured calls, by elements per rank."""
TIMEOUT = timedelta(seconds=60)
"""Time after which a collective fails."""


@dataclass(frozen=True)
class LinkFigures:
    """Measured speed of the link between ranks of one machine."""

    ranks: int
    latency_seconds: float
    """Latency of one step around a ring."""
    bytes_per_second: float
    """Bytes per second that each rank sends."""


def measure_links(ranks: int) -> LinkFigures:
    """Start `ranks` processes and measure all-gathers between them.

    On a machine with GPUs, each rank uses the GPU whose number is the rank.

    Raises:
        LaunchError: the machine has GPUs, but fewer than ranks.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise LaunchError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {torch.cuda.device_count()}\n"
            "  do: set --ranks to a smaller number"
        )
    with tempfile.TemporaryDirectory(prefix="calibrate_") as folder:
        multiprocessing.spawn(_run_rank, args=(ranks, folder), nprocs=ranks)
        small, large = map(float, (Path(folder) / "seconds").read_text().split())
    latency = small / (ranks - 1)  # a ring has ranks - 1 steps
    sent = gather_bytes(4 * LARGE_ELEMENTS * ranks, ranks)
    return LinkFigures(ranks, latency, sent / max(large - small, 1e-9))


def _run_rank(rank: int, ranks: int, folder: str) -> None:
    """Take part as one rank. Rank 0 writes the median seconds of small and of large all-gathers."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    seconds = [
        _gather_seconds(elements, ranks, device) for elements in (SMALL_ELEMENTS, LARGE_ELEMENTS)
    ]
    if rank == 0:
        (Path(folder) / "seconds").write_text(" ".join(map(str, seconds)))
    dist.barrier()
    dist.destroy_process_group()


def _gather_seconds(elements: int, ranks: int, device: torch.device) -> float:
    """Return the median seconds of an all-gather, without the first call."""
    part = torch.zeros(elements, device=device)
    whole = torch.zeros(elements * ranks, device=device)
    times = []
    for _ in range(CALLS[elements] + 1):
        start = time.perf_counter()
        dist.all_gather(list(whole.chunk(ranks)), part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[len(times) // 2 - 1]
