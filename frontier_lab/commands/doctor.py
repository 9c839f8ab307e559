"""Examine this machine, and test whether ranks on it can communicate.

usage: frontier-llm doctor [--network | --numerics] [key=value ...]

    frontier-llm doctor                      the four ranks of the default configuration
    frontier-llm doctor launch.ranks=8       eight ranks
    frontier-llm doctor --numerics model=llama_7b precision=bf16 launch.ranks=1
    srun -N 2 ... frontier-llm doctor experiment=... run.dir=runs/doctor    every rank of a job
    srun -N 2 ... frontier-llm doctor --network cluster=...    measure the network instead

Prints what a bug report needs: versions, the device and its architecture, which kernels are used
and why, the plugin and the environment variables of the network, cores, network interfaces and free
disk space. Then creates every process group of the configuration and uses it, first one by one and
then all at the same time, as a step does. Overrides are the same as for frontier-llm train.

With --numerics it then runs every kernel of the configured model, forward and backward, on the
device of each rank, in the shapes and the number format of the run, and compares the results with
formulas in fp64. A table has the largest error of each kernel and the largest that rounding
explains. If a kernel exceeds it, the command names the first one and what to set, and returns 1.

With --network it instead measures the GB/s of collectives and of messages between the ranks, with
the present environment variables and with each of cluster.environment_alternatives, and prints them
beside the links of the cluster file. Each set of variables takes up to two minutes.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_lab.option_values import check_writable
from frontier_llm.cli.compose import configured
from frontier_llm.cli.machine_defaults import refuse_nodes
from frontier_llm.config import RunConfig
from frontier_llm.config.rules import check
from frontier_llm.errors import ConfigError
from frontier_llm.launch.cores import prepare_environment, share
from frontier_llm.launch.failure import report_failure, run_rank
from frontier_llm.launch.forked_ranks import LaunchOptions
from frontier_llm.launch.rendezvous import make_store
from frontier_llm.launch.world import World
from frontier_llm.membership.launcher import launch
from frontier_llm.membership.member import Membership, Place, once
from frontier_llm.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed import Store

    from frontier_llm.trainer.context import ResolvedPrecision

Work = Callable[[World, "Store"], None]
"""What the ranks do."""
MEETING_TIMEOUT = timedelta(minutes=5)
"""Limit of the rendezvous. Under srun, nodes may start minutes apart."""
PLUGINS = ("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so")
"""Plugins of RCCL and NCCL for networks other than InfiniBand. Without a plugin these libraries use
TCP on such networks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this machine; return 0 if a run could start on it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    options = {word for word in arguments if word.startswith("-")}
    if len(options) > 1 or not options <= {"--network", "--numerics"}:
        todo = "see frontier-llm doctor --help"
        if options == {"--network", "--numerics"}:
            todo = "measure the network and compare kernels in two commands"
        raise ConfigError(
            "the command line", " ".join(sorted(options)), "--network, --numerics or neither", todo
        )
    overrides = [word for word in arguments if word not in options]
    config = configured(overrides).config
    world = World.from_environment(os.environ)
    if world is None:
        refuse_nodes(config, overrides)
    if "--network" in options:  # it needs no layout
        work = partial(measure_network, config)
    else:
        check(config, world.size if world else config.launch.ranks)
        work = partial(examine, config, numerics="--numerics" in options)
    return _on_this_machine(config, work) if world is None else _as_rank(config, world, work)


def measure_network(config: RunConfig, world: World, store: "Store") -> None:
    """Compare the speed of the network with the present variables and with alternatives.

    Collective over all ranks.
    """
    from frontier_lab.calibration.network import compare
    from frontier_llm.cli.console import wide_console

    compare(config.cluster, world, store, wide_console())


def examine(config: RunConfig, world: World, store: "Store", *, numerics: bool = False) -> None:
    """Describe the machine on rank 0, then test the connections. Collective over all ranks."""
    from frontier_lab.commands.concurrent_groups import concurrent_use
    from frontier_lab.numerics.compare import compare_on_all_ranks
    from frontier_llm.geometry.resolved import ResolvedLayout
    from frontier_llm.health.preflight import check_groups
    from frontier_llm.parallel.groups import destroy_groups
    from frontier_llm.telemetry.log import setup_logging
    from frontier_llm.trainer.assemble import prepare_device, resolve_precision
    from frontier_llm.trainer.connect import connect

    setup_logging(world.rank)
    accelerator = prepare_device(config, world)
    precision = resolve_precision(config, world, store, accelerator)
    if world.rank == 0:
        for name, words in describe(config, world, precision):
            print(f"{name:<14}{words}")
    layout = ResolvedLayout.resolve(config, world.size, world.ranks_per_node, check_rules=False)
    groups = connect(config, layout, world, store, accelerator)
    limit = timedelta(seconds=config.launch.preflight_seconds)
    check_groups([concurrent_use(*groups, layout)], world, store, accelerator.device, limit)
    destroy_groups()
    if world.rank == 0:
        print(f"{'groups':<14}all process groups work, one by one and together as in a step")
    if numerics:
        show = partial(print, flush=True)
        compare_on_all_ranks(config, world, store, accelerator, precision.name, show)
        if world.rank == 0:
            print(f"{'numerics':<14}all kernels are within their bounds on all ranks")


def describe(
    config: RunConfig, world: World, precision: "ResolvedPrecision"
) -> Iterator[tuple[str, str]]:
    """Yield the lines of the output, each as a name and a description."""
    from frontier_llm.device import identity
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.device.kernels import resolve
    from frontier_llm.health.rank_checks import free_bytes
    from frontier_llm.model.transformer import DTYPES
    from frontier_llm.saving.tiers import local_root

    may_share = config.collectives.backend == "gloo"
    accelerator = Accelerator.of_rank(world.local_rank, may_share=may_share)
    versions = identity.versions()
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    device_id = identity.device_id(accelerator)
    architecture = identity.architecture(accelerator)
    yield "device", f"{accelerator.name} ({architecture}) {device_id}".rstrip()
    yield "precision", f"{precision.name} ({precision.reason})"
    dtype, width = DTYPES[precision.name], config.model.hidden  # as the run verifies fused norms
    kernels = resolve(config.kernels, accelerator.device, dtype, width)
    yield "kernels", f"{kernels.source} ({kernels.reason})"
    yield "network", network("cpu" if may_share else accelerator.kind)
    wanted = [*config.cluster.environment, *identity.DEVICE_VARIABLES]
    variables = identity.variables(os.environ, wanted)
    yield "variables", ", ".join(f"{k}={value}" for k, value in variables.items()) or "none set"
    yield "interfaces", ", ".join(identity.interfaces()) or "only the loopback"
    yield "cores", identity.cores()
    folders = {"shared": Path(config.run.dir).absolute(), "local": local_root(config)}
    for tier, folder in folders.items():
        if folder is not None:
            try:
                check_writable(f"{tier} tier", folder)
                state = f"{format_bytes(free_bytes(folder))} free"
            except ConfigError:
                state = "cannot be written"
            yield f"{tier} tier", f"{folder}: {state}"
    yield "ranks", f"{world.size}, {world.ranks_per_node} per node, started by {world.launcher}"


def network(kind: str) -> str:
    """Return the library for collectives on a kind of device, and its plugin if one is found."""
    if kind == "cpu":
        return "gloo over TCP"
    library = "RCCL" if kind == "hip" else "NCCL"
    named = os.environ.get("NCCL_NET_PLUGIN", "")
    if named == "none":
        return f"{library}; NCCL_NET_PLUGIN=none, hence InfiniBand or TCP"
    # a path, the name of a file, or the end of a name
    wanted = (named, f"librccl-net-{named}.so", f"libnccl-net-{named}.so") if named else PLUGINS
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    found = [path for folder in folders for name in wanted if (path := Path(folder, name)).exists()]
    if found:
        return f"{library} with {found[0] if named else found[0].name}"
    if Path(named).is_file():
        return f"{library} with {named}"
    missing = f"NCCL_NET_PLUGIN={named} is not" if named else "no plugin is"
    return f"{library}; {missing} in LD_LIBRARY_PATH, hence InfiniBand or TCP"


def _on_this_machine(config: RunConfig, work: Work) -> int:
    prepare_environment(share(config.launch.ranks, os.environ), os.environ, config)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    import torch

    import frontier_llm.trainer.assemble  # noqa: F401  (imported once, before the fork)

    torch.set_num_threads(1)
    options = LaunchOptions(
        ranks=config.launch.ranks,
        failure_dir=_failure_folder(),
        ranks_per_node=config.launch.ranks_per_node,
        port=config.launch.port,
    )
    return launch(once(work), options).exit_code


def _as_rank(config: RunConfig, world: World, work: Work) -> int:
    prepare_environment(share(world.ranks_per_node, os.environ), os.environ, config)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    world = world.with_ranks_per_node(config.launch.ranks_per_node)

    def run() -> None:
        once(work)(Membership(Place(0, world, make_store(world, MEETING_TIMEOUT))))

    exit_code = run_rank(run, world.rank, _failure_folder())
    if exit_code:
        return report_failure(world.rank, world.size, _failure_folder(), exit_code)
    return 0


def _failure_folder() -> Path:
    """Return the folder for the errors of ranks, which is the same for all ranks of a Slurm job."""
    return Path("runs") / f"doctor-{os.environ.get('SLURM_JOB_ID', os.getpid())}" / "failures"
