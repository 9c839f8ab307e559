"""Read and replace the constants of a cluster file and of an engine that can be fitted.

| constant | meaning |
|---|---|
| `product_share` | speed of large matrix products as a share of the device's peak |
| `attention_share` | speed of fused attention as a share of that of large products |
| `memory_share` | share of the memory bandwidth that element-wise kernels reach |
| `hidden_share` | share of overlapping communication that is hidden |
| `near`, `far` | efficiency of the links inside a node, and between nodes |
| `elementwise_factor` | bytes of the engine's element-wise kernels, relative to fused kernels |
| `layer_us`, `micro_batch_us` | times of the engine on the host |
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from frontier_llm.config.cluster import ClusterConfig
from frontier_llm.config.engine import EngineConfig
from frontier_llm.planner.candidate import Candidate

Constants = Mapping[str, float]
"""Values of some constants, by name."""
CALIBRATION = ("attention_share", "memory_share", "hidden_share")
HOST = ("layer_us", "micro_batch_us")
LARGEST: Constants = {
    "product_share": 0.95,
    "attention_share": 1.0,
    "memory_share": 0.95,
    "hidden_share": 1.0,
    "near": 1.0,
    "far": 1.0,
}
"""Upper limits of the shares; the other constants have none. Speeds above 95% of the datasheet's
are not believed."""


def cluster_constants(cluster: ClusterConfig, precision: str) -> dict[str, float]:
    """Return the constants of a cluster; `product_share` only if the peak is known.

    Args:
        cluster: the cluster.
        precision: compute format of `product_share`.
    """
    device, calibration = cluster.device, cluster.device.calibration
    found = {name: float(getattr(calibration, name)) for name in CALIBRATION}
    peak = device.peak_tflops.get(precision)  # type: ignore[call-overload]
    curve = calibration.products.get(precision)  # type: ignore[call-overload]
    if peak and curve:
        found = {"product_share": curve.tflops / peak, **found}
    if len(cluster.links) > 1:
        found["near"] = cluster.links[0].efficiency
    return {**found, "far": cluster.links[-1].efficiency}


def with_constants(candidate: Candidate, constants: Constants) -> Candidate:
    """Return the same layout with other constants of its cluster and of its engine."""
    config = candidate.config
    planner = config.planner.model_copy(
        update={"engine": changed_engine(config.planner.engine, constants)}
    )
    cluster = changed_cluster(config.cluster, constants)
    changed = config.model_copy(update={"cluster": cluster, "planner": planner})
    return replace(candidate, config=changed)


def changed_cluster(cluster: ClusterConfig, constants: Constants) -> ClusterConfig:
    """Return a cluster with other constants; names that are not given stay."""
    device = cluster.device
    update: dict[str, Any] = {name: constants[name] for name in CALIBRATION if name in constants}
    if "product_share" in constants:
        update["products"] = {
            name: curve.model_copy(
                update={"tflops": constants["product_share"] * device.peak_tflops[name]}
            )
            if name in device.peak_tflops
            else curve
            for name, curve in device.calibration.products.items()
        }
    calibration = device.calibration.model_copy(update=update)
    links = tuple(
        link.model_copy(
            update={
                "efficiency": constants.get(
                    "far" if link.ranks is None else "near", link.efficiency
                )
            }
        )
        for link in cluster.links
    )
    device = device.model_copy(update={"calibration": calibration})
    return cluster.model_copy(update={"device": device, "links": links})


def changed_engine(engine: EngineConfig, constants: Constants) -> EngineConfig:
    """Return an engine with other constants; names that are not given stay."""
    host = engine.host.model_copy(
        update={name: constants[name] for name in HOST if name in constants}
    )
    factor = constants.get("elementwise_factor", engine.elementwise_factor)
    return engine.model_copy(update={"host": host, "elementwise_factor": factor})
