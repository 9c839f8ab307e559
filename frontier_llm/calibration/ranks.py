"""Start the ranks that measure, and combine what they measured.

All ranks measure the same at the same time, because the ranks of a run compute at the same time.
"""

import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from frontier_llm.calibration.device import DeviceFigures, measure_device
from frontier_llm.calibration.host_times import Configs, Seconds, measure_steps
from frontier_llm.calibration.links import LinkFigures, measure_links
from frontier_llm.calibration.products import ProductFigures, fitted, measure_products
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.errors import LaunchError
from frontier_llm.launch.cores import share

TIMEOUT = timedelta(seconds=120)
"""Time after which a collective fails."""


@dataclass(frozen=True)
class Figures:
    """What was measured on this machine."""

    ranks: int
    products: tuple[ProductFigures, ...]
    device: DeviceFigures
    links: LinkFigures | None
    """None if there was only one rank."""
    small_steps: Seconds


def measure(ranks: int, precisions: Sequence[str], small: Configs) -> Figures:
    """Measure on `ranks` new processes; return the means over the ranks.

    On a machine with GPUs, each rank uses the GPU whose number is the rank. `small` are the
    configurations of the small models whose steps are measured.

    Raises:
        LaunchError: the machine has GPUs, but fewer than ranks.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise LaunchError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {torch.cuda.device_count()}\n"
            "  do: set --ranks to a smaller number"
        )
    with tempfile.TemporaryDirectory(prefix="calibrate_") as name:
        folder = Path(name)
        arguments = (ranks, folder, tuple(precisions), small)
        multiprocessing.spawn(_run_rank, args=arguments, nprocs=ranks)
        found = [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(ranks)]
    return combine(found)


def combine(figures: Sequence[Figures]) -> Figures:
    """Return the means over the ranks. Those of links are the first rank's: all take part."""
    first = figures[0]
    products = [
        [
            same[0]._replace(seconds=mean(sample.seconds for sample in same))
            for same in zip(*(p.samples for p in of_format), strict=True)
        ]
        for of_format in zip(*(one.products for one in figures), strict=True)
    ]
    devices = [one.device for one in figures]
    kernels = tuple(
        replace(
            same[0],
            attention_tflops=mean(k.attention_tflops for k in same),
            attention_backward_tflops=mean(k.attention_backward_tflops for k in same),
            weight_gradient_ratio=mean(k.weight_gradient_ratio for k in same),
            elementwise_bytes_per_second=mean(k.elementwise_bytes_per_second for k in same),
        )
        for same in zip(*(one.kernels for one in devices), strict=True)
    )
    return Figures(
        first.ranks,
        tuple(
            fitted(of_format.precision, samples, of_format.processors)
            for of_format, samples in zip(first.products, products, strict=True)
        ),
        DeviceFigures(
            first.device.name,
            mean(one.memory_bytes_per_second for one in devices),
            kernels,
            mean(one.kernel_seconds for one in devices),
        ),
        first.links,
        {
            precision: {
                case: mean(one.small_steps[precision][case] for one in figures) for case in cases
            }
            for precision, cases in first.small_steps.items()
        },
    )


def _run_rank(
    rank: int,
    ranks: int,
    folder: Path,
    precisions: tuple[str, ...],
    small: Configs,
) -> None:
    """Measure as one rank; write the figures to a file whose name is the rank."""
    torch.set_num_threads(share(ranks, os.environ))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        keep_freed_memory()  # as in a training run
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    figures = Figures(
        ranks,
        tuple(measure_products(precision) for precision in precisions),
        measure_device(precisions),
        measure_links() if ranks > 1 else None,
        measure_steps(small),
    )
    (folder / f"{rank}").write_bytes(pickle.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
