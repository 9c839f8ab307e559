"""Say what this machine is to frontier_llm, and whether ranks on it can work together.

    python tools/doctor.py                                 the default's four ranks, without a run
    python tools/doctor.py launch.ranks=8                  another number of them
    srun -N 2 ... python tools/doctor.py experiment=... run.dir=runs/doctor    every rank of a job

The output is what a bug report needs: versions, device and architecture, which kernels are used and
why not the others, the plugin and the variables of the network, cores, interfaces, free space. Then
every process group of the configuration is made and used once. Keys are train.py's.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.config import RunConfig, decode
from frontier_llm.config.rules import check
from frontier_llm.parallel.agreement import run_and_leave
from frontier_llm.parallel.cores import prepare_environment, share
from frontier_llm.parallel.launcher import Launch, launch
from frontier_llm.parallel.rank import report, run_rank
from frontier_llm.parallel.world import World, make_store
from frontier_llm.units import format_bytes
from tools.compose import compose
from tools.options import ending

if TYPE_CHECKING:
    from torch.distributed import Store

MEETING_TIMEOUT = timedelta(minutes=5)
PLUGINS = ("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so")
"""Of RCCL and NCCL for a network that is not InfiniBand; without one they use TCP."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this machine; return 0 if a run could start on it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    config = decode(compose(arguments))
    world = World.from_environment(os.environ)
    return _here(config) if world is None else _as_rank(config, world)


def examine(config: RunConfig, world: World, store: "Store") -> None:
    """Describe the machine (rank 0), then prove the ranks' connections.

    Collective over all ranks.

    Raises:
        FrontierError: what would have stopped a run.
    """
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.parallel import megatron_cpu
    from frontier_llm.parallel.groups import destroy_groups
    from frontier_llm.telemetry.log import setup_logging
    from frontier_llm.trainer.connect import connect

    setup_logging(world.rank)
    accelerator = Accelerator.of_rank(world.local_rank)
    if accelerator.is_cpu:
        megatron_cpu.install()
    if world.rank == 0:
        for name, words in describe(config, world):
            print(f"{name:<14}{words}")
    connect(config, world, store, accelerator)
    destroy_groups()
    if world.rank == 0:
        print(f"{'groups':<14}all of them work")


def describe(config: RunConfig, world: World) -> Iterator[tuple[str, str]]:
    """Yield what a bug report needs, as names and words."""
    from frontier_llm.device import identity
    from frontier_llm.device.accelerator import Accelerator
    from frontier_llm.device.kernels import resolve
    from frontier_llm.parallel.rank_report import free_bytes, tiers

    accelerator = Accelerator.of_rank(world.local_rank)
    found = identity.versions()
    yield "versions", ", ".join(f"{name} {version}" for name, version in found.items())
    unique = identity.device_id(accelerator)
    yield "device", f"{accelerator.name} ({identity.architecture(accelerator)}) {unique}".rstrip()
    kernels = resolve(config.kernels, accelerator.device)
    yield "kernels", f"{kernels.source} ({kernels.reason})"
    yield "network", network(accelerator.kind)
    variables = identity.variables(os.environ, config.cluster.environment)
    yield "variables", ", ".join(f"{n}={v}" for n, v in variables.items()) or "none is set"
    yield "interfaces", ", ".join(identity.interfaces()) or "only the loopback"
    yield "cores", identity.cores()
    for tier, folder in tiers(config).items():
        yield f"{tier} tier", f"{folder}: {format_bytes(free_bytes(folder))} free"
    yield "ranks", f"{world.size}, {world.ranks_per_node} a node, started by {world.launcher}"


def network(kind: str) -> str:
    """Say what carries collectives on this kind of device, and whether its plugin is found."""
    if kind == "cpu":
        return "gloo over TCP"
    library = "RCCL" if kind == "hip" else "NCCL"
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    plugins = [
        name for folder in folders for name in PLUGINS if folder and Path(folder, name).exists()
    ]
    if plugins:
        return f"{library} with {plugins[0]}"
    return f"{library}; no plugin in LD_LIBRARY_PATH (then: InfiniBand, or TCP without it)"


def _here(config: RunConfig) -> int:
    """Start `launch.ranks` processes on this machine."""
    check(config, config.launch.ranks)
    prepare_environment(share(config.launch.ranks, os.environ), os.environ)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    import torch

    import frontier_llm.trainer.connect  # noqa: F401  (once, here: the ranks fork with it)

    torch.set_num_threads(1)
    what = Launch(
        ranks=config.launch.ranks,
        failure_dir=_failures(),
        ranks_per_node=config.launch.ranks_per_node,
        port=config.launch.port,
    )
    return launch(partial(examine, config), what)


def _as_rank(config: RunConfig, world: World) -> int:
    """Be one rank of srun or torchrun."""
    check(config, world.size)
    prepare_environment(share(world.ranks_per_node, os.environ), os.environ)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    world = world.with_nodes_of(config.launch.ranks_per_node)

    def work() -> None:
        run_and_leave(partial(examine, config), world, make_store(world, MEETING_TIMEOUT))

    code = run_rank(work, world.rank, _failures())
    return report(world.rank, world.size, _failures(), code) if code else 0


def _failures() -> Path:
    """Return where ranks explain their end; a job of its own where Slurm names one."""
    return Path("runs") / f"doctor-{os.environ.get('SLURM_JOB_ID', os.getpid())}" / "failures"


if __name__ == "__main__":
    sys.exit(ending(main))
