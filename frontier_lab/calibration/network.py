"""Compare the speed of a job's network under several sets of environment variables.

NCCL, RCCL and libfabric read the environment once per process. Therefore each rank starts a new
process for each set. The processes of a set that hangs are killed.
"""

import multiprocessing
import os
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from frontier_lab.calibration.links import network_speeds
from frontier_llm.config.cluster import ClusterConfig, Collective
from frontier_llm.device.accelerator import Accelerator
from frontier_llm.errors import LaunchError
from frontier_llm.launch.rendezvous import init_process_group
from frontier_llm.launch.world import World
from frontier_llm.planner.communication import Network
from frontier_llm.units import counted

SIZES = {"cpu": (1 << 14, 1 << 20), "cuda": (1 << 22, 1 << 28)}
"""Bytes of the tensor of all ranks that are measured, by type of device."""
CALLS = 10
"""Measured calls of each size."""
LIMIT = timedelta(seconds=120)
"""Time after which the processes of a set are killed."""
_SLACK = timedelta(seconds=60)
"""How much longer a rank waits for the others to end their processes."""
AS_SET = "as set"
"""Name of the set in which no variable is changed."""


class Outcome(NamedTuple):
    """What was measured with one set of variables."""

    name: str
    gb_per_second: Mapping[str, float]
    """GB/s that each rank sends, by collective; empty if the set failed."""
    failure: str = ""


def compare(cluster: ClusterConfig, world: World, store: dist.Store, console: Console) -> None:
    """Measure the present variables and all alternatives of the cluster; print a table on rank 0.

    Collective over all ranks, of which there must be two.
    """
    if world.size < 2:
        raise LaunchError(
            "there is no network between fewer than two ranks\n  do: set launch.ranks=2"
        )
    sets: dict[str, Mapping[str, str | None]] = {AS_SET: {}}
    sets.update({_in_words(a.variables): a.variables for a in cluster.environment_alternatives})
    outcomes = [predicted(cluster, world)]
    for number, (name, variables) in enumerate(sets.items(), 1):
        if world.rank == 0:
            console.print(f"measuring {number} of {len(sets)}: {name}")
        outcomes.append(_measure_set(name, variables, world))
        key = f"network/{number}/ended"
        if store.add(key, 1) == world.size:
            store.set(f"{key}/all", "")
        store.wait([f"{key}/all"], LIMIT + _SLACK)
    if world.rank == 0:
        console.print(table(outcomes, world))
        for alternative in cluster.environment_alternatives:
            name, reason = _in_words(alternative.variables), alternative.reason
            console.print(f"{name}: {reason} ({alternative.source})")


def predicted(cluster: ClusterConfig, world: World) -> Outcome:
    """Return the speeds that the links of the cluster file promise to these ranks."""
    network = Network(cluster, world.ranks_per_node)
    span = network.span(world.size, 1)
    kinds: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    speeds: dict[str, float] = {
        kind: span.measured[kind].gb_per_second * 1e9 if kind in span.measured else span.bandwidth
        for kind in kinds
    }
    amount = 1e12  # so many bytes that the latency does not count
    half = world.size // 2
    send = amount / network.send(half, max(1, half), amount).seconds
    speeds |= {"all_to_all": span.exchange_bandwidth, "send": send}
    name = f"conf/cluster/{cluster.name}.yaml"
    return Outcome(name, {kind: speed / 1e9 for kind, speed in speeds.items()})


def table(outcomes: list[Outcome], world: World) -> Table:
    """Return the table of the speeds; the first outcome names the columns."""
    nodes = -(-world.size // world.ranks_per_node)
    title = f"GB/s that each of {counted(world.size, 'rank')} on {counted(nodes, 'node')} sends"
    result = Table("variables", title=title, title_justify="left")
    kinds = list(outcomes[0].gb_per_second)
    for kind in kinds:
        result.add_column(kind.replace("_", "-"), justify="right")
    for outcome in outcomes:
        cells = [f"{outcome.gb_per_second[kind]:.3g}" for kind in kinds if not outcome.failure]
        result.add_row(outcome.name, *(cells or [outcome.failure]))
    return result


def _in_words(variables: Mapping[str, str | None]) -> str:
    return ", ".join(
        f"without {name}" if value is None else f"{name}={value}"
        for name, value in variables.items()
    )


def _measure_set(name: str, variables: Mapping[str, str | None], world: World) -> Outcome:
    """Measure in a new process of this rank; only rank 0 returns speeds."""
    context = multiprocessing.get_context("spawn")  # the parent may have read the environment
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(world, name, there), daemon=True)
    before = {key: os.environ.get(key) for key in variables}
    _set_environment(variables)
    try:
        process.start()
    finally:
        _set_environment(before)
    there.close()
    process.join(LIMIT.total_seconds())
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(name, {}, f"hangs: killed after {LIMIT.total_seconds():.0f} s")
    if process.exitcode:
        return Outcome(name, {}, f"fails with exit code {process.exitcode}")
    return Outcome(name, here.recv() if world.rank == 0 else {})


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _measure(world: World, name: str, result: Connection) -> None:
    """Connect to the processes of the other ranks, measure, and send rank 0's result."""
    torch.set_num_threads(1)
    accelerator = Accelerator.of_rank(world.local_rank)
    store = dist.TCPStore(world.master_address, world.master_port, timeout=LIMIT, is_master=False)
    keys = dist.PrefixStore(f"network/{world.job}/{name}", store)
    init_process_group(world, keys, "gloo" if accelerator.is_cpu else "nccl", LIMIT)
    speeds = network_speeds(SIZES[accelerator.device.type], CALLS)
    if world.rank == 0:
        result.send({kind: speed.bytes_per_second / 1e9 for kind, speed in speeds.items()})
    dist.barrier()
    dist.destroy_process_group()
