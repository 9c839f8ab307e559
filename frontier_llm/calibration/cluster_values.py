"""Compute the content of a cluster file from what was measured."""

from collections.abc import Mapping
from typing import Any

from frontier_llm.calibration.device import KernelFigures
from frontier_llm.calibration.host_times import Configs, SmallCase, host_times
from frontier_llm.calibration.links import LinkFigures, Speed
from frontier_llm.calibration.products import ProductFigures
from frontier_llm.calibration.ranks import Figures
from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.engine import EngineConfig, HostTimes
from frontier_llm.config.run import RunConfig
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.step_time import step_time


def measured(cluster: dict[str, Any], figures: Figures, small: Configs) -> dict[str, Any]:
    """Return the content of the new cluster file: `cluster` with the measured values replaced.

    `small` are the configurations of the small models whose steps were measured.
    """
    device = figures.device
    source = f"measured on {device.name} by frontier-llm calibrate"
    calibration = {
        **cluster["device"]["calibration"],
        "kernel_us": round(device.kernel_seconds * 1e6, 2),
        "source": f"{source}; memory and channels from the file it is based on",
    }
    for of_format in figures.products:
        curve = {"tflops": round(of_format.tflops, 5), "half_size": round(of_format.half_size, 1)}
        calibration["products"] = {**calibration["products"], of_format.precision: curve}
    calibration["kernels"] = {
        **calibration["kernels"],
        **{of_format.precision: _kernels(of_format) for of_format in device.kernels},
    }
    calibration["attention_share"] = _attention_share(figures)
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
    hosts = {
        precision: _host(changed, figures, precision, cases).model_dump(mode="json")
        for precision, cases in small.items()
    }
    calibration["host"] = {**calibration["host"], **hosts}
    return changed


def _kernels(figures: KernelFigures) -> dict[str, float]:
    return {
        "attention_tflops": round(figures.attention_tflops, 5),
        "attention_backward_tflops": round(figures.attention_backward_tflops, 5),
        "weight_gradient_ratio": round(figures.weight_gradient_ratio, 3),
        "elementwise_gb_per_second": round(figures.elementwise_bytes_per_second / 1e9, 2),
    }


def _attention_share(figures: Figures) -> float:
    """Return the speed of attention relative to products, in the last format that was measured."""
    products: ProductFigures = figures.products[-1]
    return round(figures.device.kernels[-1].attention_tflops / products.tflops, 3)


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
        device = {**values["device"], "calibration": calibration}
        cluster = ClusterConfig.model_validate({**values, "device": device})
        for case, config in cases.items():
            candidate = Candidate.of(config, figures.ranks, figures.ranks).with_cluster(cluster)
            planned[case] = step_time(candidate).seconds
    times = host_times(figures.small_steps[precision], planned, EngineConfig().host)
    names = ("layer_us", "micro_batch_us", "step_us")
    return times.model_copy(update={name: round(getattr(times, name), 1) for name in names})
