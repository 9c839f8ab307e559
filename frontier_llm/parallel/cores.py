"""How many CPU threads a rank may use. To be settled before torch is imported."""

import os
from collections.abc import Mapping, MutableMapping

from frontier_llm.parallel.slurm import in_step


def share(ranks_on_machine: int, environ: Mapping[str, str]) -> int:
    """Return a rank's share of the cores.

    OMP_NUM_THREADS is taken as said, and under srun SLURM_CPUS_PER_TASK; else the cores that this
    process may run on are divided evenly.
    """
    names = ["OMP_NUM_THREADS", *(["SLURM_CPUS_PER_TASK"] if in_step(environ) else [])]
    for name in names:
        if environ.get(name, "").isdigit():
            return max(1, int(environ[name]))
    return max(1, available() // ranks_on_machine)


def available() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_environment(threads: int, environ: MutableMapping[str, str]) -> None:
    """Set what libraries read once, when they are imported.

    The threads of OpenMP and BLAS; how torch looks for devices (through the driver's library, so
    that a parent which only looked can still fork); and the one hardware queue that lets
    communication overlap with tensor-parallel computation in the order it was issued.
    """
    environ["OMP_NUM_THREADS"] = environ["MKL_NUM_THREADS"] = str(threads)
    environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own pool would start at import, before a fork
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings bury the message of the cause
    environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
