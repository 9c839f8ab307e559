"""Start the ranks that measure, and make a cluster file of what they measured.

All ranks measure the same at the same time, because the ranks of a run compute at the same time.
"""

import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from frontier_lab.calibration.device import (
    DeviceFigures,
    KernelFigures,
    ProductFigures,
    fitted,
    measure_device,
    measure_products,
)
from frontier_lab.calibration.host_times import (
    CASES,
    Configs,
    SmallCase,
    SmallSteps,
    host_times,
    measure_steps,
)
from frontier_lab.calibration.links import LinkFigures, Speed, measure_links
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.engine import EngineConfig, HostTimes
from frontier_llm.config.run import RunConfig
from frontier_llm.device.accelerator import keep_freed_memory
from frontier_llm.errors import LaunchError
from frontier_llm.launch.cores import share
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.memory import fullest
from frontier_llm.planner.step_time import step_time
from frontier_llm.units import GIB

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
    small_steps: SmallSteps


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
        # the ranks of a run on CPUs are forked, and share the memory of what was imported before
        method = "spawn" if torch.cuda.is_available() else "fork"
        multiprocessing.start_processes(_run_rank, arguments, ranks, start_method=method)
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
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        found = {name: _mean([getattr(value, name) for value in values]) for name in names}
        return replace(first, **found)
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
    small_steps = measure_steps(small)
    figures = Figures(
        ranks,
        tuple(measure_products(precision) for precision in precisions),
        measure_device(precisions),
        measure_links() if ranks > 1 else None,
        small_steps,
    )
    (folder / f"{rank}").write_bytes(pickle.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def measured(cluster: dict[str, Any], figures: Figures, small: Configs) -> dict[str, Any]:
    """Return the content of the new cluster file: `cluster` with the measured values replaced.

    `small` are the configurations of the small models whose steps were measured.
    """
    device = figures.device
    source = f"measured on {device.name} by frontier-llm calibrate"
    calibration = {
        **cluster["device"]["calibration"],
        "kernel_us": round(device.kernel_seconds * 1e6, 2),
        "source": f"{source}; channels, and the slack of a GPU, from the file it is based on",
    }
    for of_format in figures.products:
        curve = {"tflops": round(of_format.tflops, 5), "half_size": round(of_format.half_size, 1)}
        calibration["products"] = {**calibration["products"], of_format.precision: curve}
    calibration["kernels"] = {
        **calibration["kernels"],
        **{of_format.precision: _kernels(of_format) for of_format in device.kernels},
    }
    last = device.kernels[-1].attention_tflops / figures.products[-1].tflops
    calibration["attention_share"] = round(last, 3)
    measured_gb = device.memory_bytes_per_second / 1e9
    nominal_gb = cluster["device"]["memory_gb_per_second"]
    calibration["memory_share"] = round(min(1.0, measured_gb / nominal_gb), 3)
    new_device: dict[str, Any] = {**cluster["device"], "calibration": calibration}
    new_device["processors"] = figures.products[0].processors
    if measured_gb > nominal_gb:
        new_device |= {"memory_gb_per_second": round(measured_gb, 1), "source": source}
    local_link = dict(cluster["links"][0])
    if figures.links is not None:
        calibration["hidden_share"] = round(figures.links.hidden_share, 3)
        local_link |= _link(figures.links, source)
    changed = {**cluster, "device": new_device, "links": [local_link, *cluster["links"][1:]]}
    slack_share = calibration["slack_share"]
    calibration |= {"reserved_gib": 0.0, "slack_share": 1.0}  # until the rest is planned
    calibration |= _memory(changed, figures, small, slack_share)
    hosts = {
        precision: _host(changed, figures, precision, cases).model_dump(mode="json")
        for precision, cases in small.items()
    }
    calibration["host"] = {**calibration["host"], **hosts}
    return changed


MOST_SLACK = 2.0
"""Largest share of temporary tensors that malloc is taken to hold unused: more is a disturbance."""


def _memory(
    values: dict[str, Any], figures: Figures, small: Configs, slack_share: float
) -> dict[str, float]:
    """Return what a rank uses beside its tensors: `reserved_gib` and `slack_share`.

    `values` are a file that reserves nothing, with a `slack_share` of 1. The used memory of a GPU
    has no slack, so that the given share stays. On a CPU the large model shows it: malloc places
    small tensors into the gaps that large ones leave, and the next large one finds no gap.
    """
    used, rests, temporary = figures.small_steps.used_bytes, [], []
    for case in (CASES[0], CASES[2]):
        config = next(iter(small.values()))[case]
        planned = fullest(_candidate(values, figures, config))
        temporary.append(planned.by_category["slack"])
        rests.append(used[case] - planned.total + temporary[-1])
    if values["device"]["kind"] == "cpu":
        growth = (rests[1] - rests[0]) / max(temporary[1] - temporary[0], 1.0)
        slack_share = min(max(0.0, growth), MOST_SLACK)
    reserved_bytes = max(0.0, rests[0] - slack_share * temporary[0])
    return {"reserved_gib": round(reserved_bytes / GIB, 3), "slack_share": round(slack_share, 3)}


def _candidate(values: dict[str, Any], figures: Figures, config: RunConfig) -> Candidate:
    cluster = ClusterConfig.model_validate(values)
    return Candidate.of(config, figures.ranks, figures.ranks).with_cluster(cluster)


def _kernels(figures: KernelFigures) -> dict[str, float]:
    return {
        "attention_tflops": round(figures.attention_tflops, 5),
        "attention_backward_tflops": round(figures.attention_backward_tflops, 5),
        "weight_gradient_ratio": round(figures.weight_gradient_ratio, 3),
        "elementwise_gb_per_second": round(figures.elementwise_bytes_per_second / 1e9, 2),
        "quantise_gb_per_second": round(figures.quantise_bytes_per_second / 1e9, 2),
    }


def _link(links: LinkFigures, source: str) -> dict[str, Any]:
    return {
        **_speed(links.messages),
        "efficiency": 1.0,
        "collectives": {name: _speed(speed) for name, speed in links.collectives.items()},
        "source": f"{source} with {links.ranks} ranks",
    }


def _speed(speed: Speed) -> dict[str, float]:
    return {
        "latency_us": round(speed.latency_seconds * 1e6, 1),
        "gb_per_second": round(speed.bytes_per_second / 1e9, 3),
    }


def _host(
    values: dict[str, Any],
    figures: Figures,
    precision: str,
    cases: Mapping[SmallCase, RunConfig],
) -> HostTimes:
    """Return the times of the CPU in one format, given a cluster file without them."""
    planned = dict.fromkeys(cases, 0.0)
    if values["device"]["kind"] == "cpu":
        calibration = {**values["device"]["calibration"], "host": {}}
        without = {**values, "device": {**values["device"], "calibration": calibration}}
        for case, config in cases.items():
            planned[case] = step_time(_candidate(without, figures, config)).seconds
    times = host_times(figures.small_steps.seconds[precision], planned, EngineConfig().host)
    names = ("layer_us", "tensor_us", "micro_batch_us", "step_us")
    return times.model_copy(update={name: round(getattr(times, name), 1) for name in names})
