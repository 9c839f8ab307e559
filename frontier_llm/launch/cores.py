"""Sets the number of CPU threads of a rank, and warns when a node has fewer cores than threads.

The number of threads must be set before torch is imported, like the other environment variables of
this module.
"""

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.launch.slurm import is_srun_task
from frontier_llm.launch.visible_devices import torch_kind
from frontier_llm.units import counted

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_CPUS_OF_TASK = "SLURM_CPUS_PER_TASK"
_MOST_RANKS_PER_CORE = 4

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables from which torch reads the settings of its allocator; the first one is current."""
EXPANDABLE = "expandable_segments:True"
"""Lets the allocator of a GPU extend its segments. Sharded parameters allocate and free buffers of
different sizes all the time, and with segments of fixed sizes the free memory would be fragmented.
Not set for ROCm, where torch supports it only since 2.12 and where it has hung (pytorch issue
192259)."""

SURVIVAL = {
    # Otherwise the watchdog thread of a group ends the process when a collective has failed. torch
    # asks for this value in `_abort_process_group`.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # another value sets the variable above to 3
    # The same after an error of CUDA, which an aborted collective may cause. NVIDIA asks for this
    # value in Megatron Bridge. The main thread gets an error of its own device from its next call.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Otherwise a second thread ends the process if the watchdog thread hangs, for example while it
    # asks a device that another thread blocks (pytorch issue 155916).
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The watchdog thread announces an error by a key of the store that stays there in later
    # generations. The second thread of a process that replaces a dead one would find it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After each failed collective the watchdog thread sleeps four times as long, by default 60 s,
    # and the destructor of the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Values with which torch lets a process live when another rank has died.

torch reads them when it creates a process group (ProcessGroupNCCL.cpp of torch 2.9 and 2.10)."""


def share(ranks_on_machine: int, environ: Mapping[str, str]) -> int:
    """Return the number of CPU threads for each rank.

    The number is OMP_NUM_THREADS if set, else SLURM_CPUS_PER_TASK under srun, else an equal share
    of the cores that this process may use.
    """
    for name in ("OMP_NUM_THREADS", *([_CPUS_OF_TASK] if is_srun_task(environ) else [])):
        if environ.get(name, "").isdecimal():
            return max(1, int(environ[name]))
    return max(1, available() // ranks_on_machine)


def available() -> int:
    """Return how many cores this process may use, by its CPU affinity and its cgroup's limit."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, cgroup_limit() or cores)


def cgroup_limit(root: Path = _CGROUPS, membership: Path = _CGROUPS_OF_PROCESS) -> int | None:
    """Return the number of cores allowed by the cgroups of this process; None = no known limit.

    Reads cgroups of version 1 or 2.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    quotas: list[float] = []
    for _, controllers, path in lines:
        if controllers == "":  # version 2
            quotas += _quotas(root, path)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root / "cpu", path)
    return max(1, math.ceil(min(quotas))) if quotas else None


def crowding(
    threads: int, ranks: int, environ: Mapping[str, str], cores: int | None = None
) -> str | None:
    """Return a warning when the ranks of a node run more threads than there are cores.

    With one thread per rank, of which fewer cannot be set, it only warns of too many ranks. Under
    srun each rank has its own cores, and `ranks`, the number on the node, is ignored.
    """
    cores = cores or available()
    sharing = ranks  # number of ranks that share the cores
    if is_srun_task(environ):
        sharing = 1
        if environ.get(_CPUS_OF_TASK, "").isdigit():
            cores = min(cores, max(1, int(environ[_CPUS_OF_TASK])))
    if sharing > _MOST_RANKS_PER_CORE * cores:
        return (
            f"warning: {sharing} ranks on {counted(cores, 'core')} make every step slow, and may "
            "need more memory than there is"
        )
    if threads == 1 or threads * sharing <= cores:
        return None
    recommended = max(1, cores // sharing)
    return (
        f"warning: {threads} threads in each of {counted(sharing, 'rank')} "
        f"on {counted(cores, 'core')} make every step slow; "
        f"set launch.threads={recommended} (or OMP_NUM_THREADS={recommended})"
        + (", or ask for more cores per task (srun -c)" if is_srun_task(environ) else "")
    )


def check_survival(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the environment sets a variable of `SURVIVAL` otherwise."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return  # torchrun sets one of them; that it does not replace ranks is refused elsewhere
    todo = "unset it, or set recovery.enabled=false"
    for name, wanted in SURVIVAL.items():
        if environ.get(name, wanted) != wanted:
            wants = f"{wanted} with recovery.enabled=true, or torch ends ranks that outlive another"
            raise ConfigError(name, environ[name], wants, todo)
    name = "TORCH_DISTRIBUTED_DEBUG"
    if environ.get(name, "").upper() == "DETAIL":
        raise ConfigError(name, "DETAIL", "OFF or INFO with recovery.enabled=true", todo)


def prepare_environment(
    threads: int, environ: MutableMapping[str, str], config: RunConfig | None = None
) -> None:
    """Set the environment variables that libraries read once, when they are imported or started.

    Except for the numbers of threads and for `SURVIVAL`, a value that is set already stays.
    """
    environ["OMP_NUM_THREADS"] = environ["MKL_NUM_THREADS"] = str(threads)
    environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own pool would start at import, before a fork
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings would hide the cause of a failure
    # For its log, torch asks a name server who is at the other end of each connection to the store.
    # If the server drops some of the questions of thousands of ranks, each of these takes the time
    # limit of the resolver, by default 5 s. After a failed question torch asks no more.
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # count GPUs through the driver's library, so that a process that has counted them can fork
    environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not any(name in environ for name in ALLOCATOR_VARIABLES) and torch_kind() != "hip":
        environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE
    if config is None:
        return
    if config.parallel.tensor > 1:
        # With one hardware queue, megatron's tensor-parallel communication starts before the
        # computation that is submitted after it. Otherwise one queue would only make gathers,
        # reductions and checkpoint copies wait for each other.
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.recovery.enabled:
        environ.update(SURVIVAL)
    if config.trainer.deterministic:
        # One of two values with which NVIDIA promises equal products; torch refuses all others:
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _quotas(mount: Path, path: str) -> Iterator[float]:
    """Yield the limits, in cores, of a cgroup and of its parents, where they can be read."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                words = [word for name in names for word in (folder / name).read_text().split()]
                quota, period = map(int, words)
            except (OSError, ValueError):  # absent, or "max": no limit
                continue
            if quota > 0 and period > 0:
                yield quota / period
