"""Reads a task's rank, size and node, and the end of its job, from the variables of Slurm.

`world` calls it for ranks that srun started. A task is one process of a job step, and a job step is
the work of one srun command.
"""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from frontier_llm.errors import LaunchError

_RANK_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
SECRET = "FRONTIER_LLM_SECRET"
"""Environment variable with random text that the job script has drawn (scripts/common_env.sh), so
that other users cannot compute the port and the keys of a job's store."""
STARTED_AGAIN = "FRONTIER_LLM_STARTED_AGAIN"
"""Environment variable that is 1 if the ranks were started again after a failure."""
_FIRST_RESERVED_STEP = 0xFFFFFFFA  # shells of salloc and sbatch have this step id or a larger one
# Rank 0's store uses one of the ports 15000 to 29999; the system assigns higher ones by itself.
_FIRST_PORT, _NUMBER_OF_PORTS = 15000, 15000
_SQUEUE_TIMEOUT_SECONDS = 10


class EnvironmentMismatchError(LaunchError):
    """The variables of srun or torchrun are incomplete or contradict each other."""

    exit_code = 2


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step. `World` has fields with the same meaning."""

    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    master_address: str
    master_port: int
    """TCP port of rank 0's store: MASTER_PORT, or else derived from `job`."""
    job: str
    """Numbers of the job and step, `4711.0`, and the job's secret if it has one."""


def is_srun_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task of a parallel program.

    A shell inside an allocation (salloc, sbatch, `srun --pty bash`) has some of the same variables
    but is not a task.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _FIRST_RESERVED_STEP:
        return False
    is_only_task = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")) == "1"
    return not (is_only_task and "SLURM_PTY_PORT" in environ)


def started_again(environ: Mapping[str, str]) -> bool:
    """Return whether the run of this process failed before, and was started again.

    Slurm has requeued the job, or its script has started the ranks again.
    """
    if environ.get(STARTED_AGAIN) == "1":
        return True
    return is_srun_task(environ) and int(environ.get("SLURM_RESTART_COUNT", "0")) > 0


def read_task(environ: Mapping[str, str]) -> SlurmTask:
    """Read the rank, size and node of this task in its step.

    Raises an EnvironmentMismatchError if variables are missing, nodes have unequal numbers of
    tasks, or the tasks are not numbered node by node.
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
    # In old versions of Slurm, SLURM_NTASKS can be the number of tasks of the allocation;
    # SLURM_STEP_NUM_TASKS is that of the step.
    of_step = "SLURM_STEP_NUM_TASKS"
    size = number(environ, of_step if of_step in environ else "SLURM_NTASKS")
    rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID")
    per_node = _tasks_per_node(environ, size)
    if rank % per_node != local_rank:
        raise EnvironmentMismatchError(
            f"task {rank} is number {local_rank} on its node, but with {per_node} tasks per node "
            f"it should be number {rank % per_node}: neighbouring ranks must share a node; use "
            "srun --distribution=block"
        )
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "0"))
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
    secret = environ.get(SECRET, "")
    names = hosts(nodes or "")
    return SlurmTask(
        rank,
        size,
        local_rank,
        per_node,
        names,
        environ.get("MASTER_ADDR", names[0] if names else ""),
        number(
            {"MASTER_PORT": str(job_port(job, step, secret)), **environ},
            "MASTER_PORT",
            range(1 << 16),
        ),
        f"{job}.{step}.{secret}" if secret else f"{job}.{step}",
    )


def number(environ: Mapping[str, str], name: str, allowed: range = range(1 << 31)) -> int:
    """Return the value of a variable that srun or torchrun sets."""
    if environ[name].isdecimal() and int(environ[name]) in allowed:
        return int(environ[name])
    raise EnvironmentMismatchError(
        f"{name}={environ[name]!r} is not a whole number from {allowed[0]} to {allowed[-1]}: start "
        f"with torchrun or srun, or unset {name} for a local run"
    )


def hosts(nodes: str) -> tuple[str, ...]:
    """Return the hosts of a node list: for `n[08-10,7],x` these are n08, n09, n10, n7, x."""
    parts = re.findall(r"((?:[^,\[]|\[[^\]]*\])+)", nodes)
    return tuple(host for part in parts for host in _expand(part))


def _expand(part: str) -> list[str]:
    """Expand the first bracket of a name, then recursively the following ones."""
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    before, after = part[: match.start()], part[match.end() :]
    names = [f"{before}{number}" for item in match[1].split(",") for number in _numbers(item)]
    return [name + rest for name in names for rest in _expand(after)]


def _numbers(item: str) -> list[str]:
    """Return the numbers of one item of a bracket: for `08-10` these are 08, 09, 10."""
    first, _, last = item.partition("-")
    if not last:
        return [first]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def equal_tasks(text: str) -> int:
    """Return the number of tasks per node, given as `4(x2)`, `8` or `4,4`, if all are equal."""
    counts = {int(part.split("(")[0]) for part in text.split(",")}
    if len(counts) > 1:
        raise _unequal_tasks(text)
    return counts.pop()


def _unequal_tasks(description: str) -> EnvironmentMismatchError:
    return EnvironmentMismatchError(
        f"srun placed unequal numbers of tasks on the nodes ({description}); request equal "
        "numbers: srun --ntasks-per-node=N with N x nodes tasks in total"
    )


def job_port(job: str, step: str, secret: str = "") -> int:
    """Derive the TCP port of rank 0's store from the job: equal on all tasks of a step."""
    number = int(re.sub(r"\D", "", job) or 0) * 97 + int(re.sub(r"\D", "", step) or 0)
    if secret:
        number += int.from_bytes(hashlib.sha256(secret.encode()).digest()[:8], "big")
    return _FIRST_PORT + number % _NUMBER_OF_PORTS


def _tasks_per_node(environ: Mapping[str, str], size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            return equal_tasks(environ[name])
    if "SLURM_NTASKS_PER_NODE" in environ:
        return int(environ["SLURM_NTASKS_PER_NODE"])
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    if size % nodes:
        raise _unequal_tasks(f"{size} tasks on {nodes} nodes")
    return size // nodes


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return when Slurm ends this job, in seconds since 1970; None without a job or a time limit.

    Older releases of Slurm do not put this time into the environment; then squeue is run once.
    """
    if environ.get("SLURM_JOB_END_TIME", "").isdigit():
        return float(environ["SLURM_JOB_END_TIME"])
    job = environ.get("SLURM_JOB_ID")
    if job is None or shutil.which("squeue") is None:
        return None
    try:
        squeue = subprocess.run(
            ["squeue", "--noheader", f"--job={job}", "--format=%e"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SQUEUE_TIMEOUT_SECONDS,
        )
        return datetime.fromisoformat(squeue.stdout.strip()).timestamp()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # the job still gets the signal before its end (sbatch --signal)
