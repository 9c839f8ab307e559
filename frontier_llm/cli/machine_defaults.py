"""Defaults of conf/train.yaml that follow from the devices of this machine.

Importing this module registers them as resolvers, functions that files of conf/ call:
`${machine:cluster}` and `${default:ranks}`. A value of the command line replaces the call.
"""

import math
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from frontier_llm.cli.group_files import file_values, key_of
from frontier_llm.cli.package_files import conf_folders
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.launch.slurm import EnvironmentMismatchError
from frontier_llm.launch.visible_devices import VisibleDevices, visible_devices
from frontier_llm.launch.world import World

WITHOUT_GPU, UNKNOWN_GPU = "cpu_laptop", "other_gpu"
"""Cluster files of a machine without a GPU, and of one whose GPU no file describes."""
OF_THIS_MACHINE = ("auto", UNKNOWN_GPU)
"""Cluster files whose values follow from this machine."""
MEMORY_TOLERANCE = 0.1
"""Largest difference between a device's memory and that of its file. Drivers report up to 2% less
than the data sheet, and a partition of a GPU (MIG) has half of its memory or less."""
MICRO_BATCH = 4
"""Largest default of data.micro_batch."""


@cache
def cluster_of_this_machine() -> str:
    """Return the name of the cluster file for `cluster=auto`; print it to stderr if there is a GPU.

    A file describes the device if its kind is the same, its `name_pattern` matches the name and its
    memory differs by at most 10%. Of several files, that of the site which Slurm names in
    SLURM_CLUSTER_NAME comes first (`lumi_mi250x` on `lumi`), then one with as many ranks per node
    as there are devices, then the files of --conf-dir, then the order of the alphabet.
    """
    devices = visible_devices()
    if devices is None:
        return WITHOUT_GPU
    # the user's files come first
    files = [file for folder in conf_folders() for file in sorted(folder.glob("cluster/*.yaml"))]
    names = [name for name in dict.fromkeys(f.stem for f in files) if name not in OF_THIS_MACHINE]
    sections = {name: file_values("cluster", name) for name in names}
    fitting = [name for name, values in sections.items() if _describes(values["device"], devices)]
    per_node = max(devices.count, world.ranks_per_node if (world := _world()) else 0)
    site = os.environ.get("SLURM_CLUSTER_NAME", "").lower()
    fitting.sort(
        key=lambda name: (
            name.partition("_")[0] not in site,
            sections[name]["ranks_per_node"] != per_node,
        )
    )
    found = f"{devices.count} x {devices.name} ({devices.memory_gib:.0f} GiB)"
    if fitting:
        others = f"; cluster={' and cluster='.join(fitting[1:])} would fit, too"
        text = f"{fitting[0]}, for {found}{others if fitting[1:] else ''}"
    else:
        same_kind = [name for name, v in sections.items() if v["device"]["kind"] == devices.kind]
        text = (
            f"{found}: no file of conf/cluster has this name and memory, so the peak speed counts "
            f"as unknown; set cluster=NAME ({', '.join(same_kind)}), or measure this machine with "
            "frontier-llm calibrate --write NAME"
        )
    print(f"{'cluster':<11}{text}", file=sys.stderr)
    return fitting[0] if fitting else UNKNOWN_GPU


def _describes(device: dict[str, Any], visible: VisibleDevices) -> bool:
    difference = abs(visible.memory_gib / device["memory_gib"] - 1)
    return (
        device["kind"] == visible.kind
        and re.search(device["name_pattern"], visible.name) is not None
        and difference <= MEMORY_TOLERANCE
    )


def limit_memory(cluster: Any) -> None:
    """Lower the memory of a composed cluster to that of the visible GPU, if it is the same kind.

    A driver keeps a part of the memory of the data sheet for itself.
    """
    devices = visible_devices()
    try:
        if devices and _describes(device := cluster["device"], devices):
            device["memory_gib"] = min(device["memory_gib"], round(devices.memory_gib, 2))
    except (TypeError, KeyError, re.error):  # a value of the wrong type, which decode refuses
        return


def check_devices(config: RunConfig) -> None:
    """Refuse to train on other devices than those of the cluster file, whose memory is checked."""
    devices, wanted = visible_devices(), config.cluster.device.kind
    kind = devices.kind if devices else "cpu"
    if kind != wanted:
        raise ConfigError(
            "cluster",
            f"{config.cluster.name}, whose devices are {wanted}",
            f"a cluster with the devices of this machine ({kind})",
            "add cluster=auto to train on this machine, plan=dry_run to build the model without "
            "memory, or plan=off to train on other devices than planned",
        )


def refuse_nodes(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse a number of nodes where no launcher has started ranks: they run on this machine."""
    for key, nodes in (
        ("launch.nodes", config.launch.nodes),
        ("planner.nodes", config.planner.nodes),
    ):
        if nodes and key in map(key_of, overrides):
            raise ConfigError(
                key, nodes, "no nodes: without srun all ranks run on this machine (launch.ranks)",
                f"leave out {key}, or start the ranks with srun; frontier-llm launch makes a job",
            )  # fmt: skip


def _world() -> World | None:
    """Return the place of this process among ranks of srun or torchrun; None = it is no rank."""
    try:
        return World.from_environment(os.environ)
    except EnvironmentMismatchError:  # the command refuses it, if it starts ranks
        return None


def _ranks(root: DictConfig) -> int:
    """Return the ranks that a launcher has started, or one per GPU, or those of a node."""
    world, devices = _world(), visible_devices()
    if world or devices is None:
        return world.size if world else _number(root, "cluster.ranks_per_node")
    return devices.count


def _pipeline(root: DictConfig) -> int:
    """Return one pipeline stage on GPUs; two on a CPU that has ranks for it, to show a pipeline."""
    on_cpu = OmegaConf.select(root, "cluster.device.kind") == "cpu" and visible_devices() is None
    others = _number(root, "parallel.tensor") * _number(root, "parallel.context")
    return 2 if on_cpu and _ranks_of_job(root) % (2 * others) == 0 else 1


def _micro_batch(root: DictConfig) -> int:
    """Return the largest micro-batch, up to MICRO_BATCH, that divides each replica's samples."""
    if OmegaConf.select(root, "parallel.context") == "auto":
        return 1  # fits any number of replicas
    model_ranks = math.prod(
        _number(root, f"parallel.{axis}") for axis in ("tensor", "pipeline", "context")
    )
    for ranks in (_ranks_of_job(root), _number(root, "launch.ranks")):
        samples, rest = divmod(_number(root, "data.global_batch"), max(1, ranks // model_ranks))
        if not rest:
            return math.gcd(MICRO_BATCH, samples)
    return MICRO_BATCH  # the rules refuse the global batch


def _ranks_of_job(root: DictConfig) -> int:
    """Return the ranks that a launcher has started, or those of the nodes to launch or plan."""
    planned = OmegaConf.select(root, "planner.nodes")
    last = planned[-1] if isinstance(planned, ListConfig) and planned else None
    nodes = OmegaConf.select(root, "launch.nodes") or last
    if (world := _world()) or not isinstance(nodes, int):
        return world.size if world else _number(root, "launch.ranks")
    section = "cluster" if OmegaConf.select(root, "launch.ranks_per_node") is None else "launch"
    return nodes * _number(root, f"{section}.ranks_per_node")


def _number(root: DictConfig, key: str) -> int:
    """Return the value of a key; 1 if it is no positive number, because decode refuses it later."""
    try:
        value = OmegaConf.select(root, key)
    except OmegaConfBaseException:
        return 1
    return value if isinstance(value, int) and value > 0 else 1


def _of_device(key: str) -> str | float:
    devices = visible_devices() or VisibleDevices("cuda", "GPU", 16.0, 1)
    value: str | float = getattr(devices, key)
    return round(value, 2) if isinstance(value, float) else value


_DEFAULTS = {"ranks": _ranks, "pipeline": _pipeline, "micro_batch": _micro_batch}
OmegaConf.register_new_resolver(
    "machine", lambda key: cluster_of_this_machine() if key == "cluster" else _of_device(key)
)
OmegaConf.register_new_resolver("default", lambda key, *, _root_: _DEFAULTS[key](_root_))
