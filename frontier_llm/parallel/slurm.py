"""What srun tells a process, in SLURM_* variables; only the end of a job may be asked of squeue."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from frontier_llm.errors import LaunchError

_RANK_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_FIRST_RESERVED_STEP = 0xFFFFFFFA  # the shells of salloc and sbatch have step ids from here on
_FIRST_PORT, _PORTS = 15000, 15000  # below the ports that Linux hands out by itself
_SQUEUE_SECONDS = 10


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
    hosts: tuple[str, ...]
    """Nodes of the step, in the order of the tasks."""
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


def started_again(environ: Mapping[str, str]) -> bool:
    """Whether Slurm has requeued the job that this process is a task of."""
    return in_step(environ) and int(environ.get("SLURM_RESTART_COUNT", "0")) > 0


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
        hosts(nodes or ""),
        job_port(job, step),
        f"{job}.{step}",
    )


def hosts(nodes: str) -> tuple[str, ...]:
    """Return the hosts of a node list: `n[08-10,7],x` is n08, n09, n10, n7, x."""
    parts = re.findall(r"((?:[^,\[]|\[[^\]]*\])+)", nodes)
    return tuple(host for part in parts for host in _expand(part))


def _expand(part: str) -> list[str]:
    """Expand the first bracket of a name, and then those that follow."""
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    before, after = part[: match.start()], part[match.end() :]
    names = [f"{before}{number}" for item in match[1].split(",") for number in _numbers(item)]
    return [name + rest for name in names for rest in _expand(after)]


def _numbers(item: str) -> list[str]:
    first, _, last = item.partition("-")
    if not last:
        return [first]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


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


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return when Slurm ends this job, in seconds since 1970; None without a job or a limit.

    Older releases of Slurm do not say it in the environment; then squeue is asked, once.
    """
    if environ.get("SLURM_JOB_END_TIME", "").isdigit():
        return float(environ["SLURM_JOB_END_TIME"])
    job = environ.get("SLURM_JOB_ID")
    if job is None or shutil.which("squeue") is None:
        return None
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", f"--job={job}", "--format=%e"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SQUEUE_SECONDS,
        )
        return datetime.fromisoformat(asked.stdout.strip()).timestamp()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # the signal before the end (sbatch --signal) still comes
