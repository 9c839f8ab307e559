"""Start the ranks that measure, and combine what they measured.

All ranks measure the same at the same time, because the ranks of a run compute at the same time.
"""

import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

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

    On a machine with GPUs, each rank uses the GPU whose number is the rank.

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
    """Return the means over the ranks, with curves that are fitted to the means.

    The figures of links are the first rank's: all ranks take part in them.
    """
    means = _mean(figures)
    products = [
        fitted(of_format.precision, of_format.samples, of_format.processors)
        for of_format in means.products
    ]
    return replace(means, products=tuple(products), links=figures[0].links)


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, field by field if they are in data classes or collections."""
    first = values[0]
    if isinstance(first, float):
        return mean(values)
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        means = map(_mean, zip(*values, strict=True))
        return first._make(means) if hasattr(first, "_make") else tuple(means)
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        found = {name: _mean([getattr(value, name) for value in values]) for name in names}
        return type(first)(**found)
    return first


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
