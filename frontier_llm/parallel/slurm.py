"""What srun tells a process: read from SLURM_* variables alone, without scontrol."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from frontier_llm.errors import LaunchError

_RANK_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_FIRST_RESERVED_STEP = 0xFFFFFFFA  # the shells of salloc and sbatch have step ids from here on
_FIRST_PORT, _PORTS = 15000, 15000  # below the ports that Linux hands out by itself


class EnvironmentMismatchError(LaunchError):
    """The variables of srun or torchrun are incomplete or contradict each other."""

    exit_code = 2


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step."""

    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    first_host: str
    port: int
    job: str


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task.

    A shell inside an allocation (salloc, sbatch, `srun --pty bash`) carries some of the same
    variables but is no task of a parallel program.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _FIRST_RESERVED_STEP:
        return False
    alone = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")) == "1"
    return not (alone and "SLURM_PTY_PORT" in environ)


def read_task(environ: Mapping[str, str]) -> SlurmTask:
    """Read this task's place in its step.

    Raises:
        EnvironmentMismatchError: variables are missing, nodes have unequal numbers of tasks, or the
            tasks are not numbered node by node.
    """
    missing = [name for name in _RANK_VARIABLES if name not in environ]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes is None and "MASTER_ADDR" not in environ:
        missing.append("SLURM_STEP_NODELIST")
    if missing:
        raise EnvironmentMismatchError(
            f"srun's environment is incomplete: {', '.join(missing)} not set; start with "
            "`srun python train.py`, or unset SLURM_PROCID for a local run"
        )
    # srun sets SLURM_STEP_NUM_TASKS anew; SLURM_NTASKS can be the allocation's in old versions.
    size = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
    rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
    per_node = _tasks_per_node(environ, size)
    if rank % per_node != local_rank:
        raise EnvironmentMismatchError(
            f"task {rank} is number {local_rank} on its node, but with {per_node} tasks a node it "
            "should be number "
            f"{rank % per_node}: neighbouring ranks must share a node; use srun "
            "--distribution=block"
        )
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "0"))
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
    return SlurmTask(
        rank,
        size,
        local_rank,
        per_node,
        first_host(nodes or ""),
        job_port(job, step),
        f"{job}.{step}",
    )


def first_host(nodes: str) -> str:
    """Return the first host of a node list: `node[001-004,7],x` begins with `node001`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")


def equal_tasks(text: str) -> int:
    """Return the tasks of each node from `4(x2)`, `8` or `4,4`.

    Raises:
        EnvironmentMismatchError: they differ from node to node.
    """
    counts = {int(part.split("(")[0]) for part in text.split(",")}
    if len(counts) > 1:
        raise EnvironmentMismatchError(
            f"srun placed unequal numbers of tasks on the nodes ({text}); ask for equal ones: "
            "srun --ntasks-per-node=N with N x nodes tasks in all"
        )
    return counts.pop()


def job_port(job: str, step: str) -> int:
    """Derive the rendezvous' TCP port, the same on all tasks, different for most other steps."""
    number = int(re.sub(r"\D", "", job) or 0) * 97 + int(re.sub(r"\D", "", step) or 0)
    return _FIRST_PORT + number % _PORTS


def _tasks_per_node(environ: Mapping[str, str], size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            return equal_tasks(environ[name])
    if "SLURM_NTASKS_PER_NODE" in environ:
        return int(environ["SLURM_NTASKS_PER_NODE"])
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    return equal_tasks(str(size // nodes)) if size % nodes == 0 else equal_tasks(f"{size},0")
