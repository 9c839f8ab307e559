"""The faults that are injected into running jobs, and how a job's output must name each cause."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.slurm_lab.jobs import Job

TARGET_RANK = 3
"""The rank that is killed or stopped: the last of four, on the second node of the job."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    """Name in the table."""
    act: Callable[[Job], None]
    """Injects the fault into a running job."""
    culprit: str
    """Regular expression that must match in the job's output; empty: there is no cause to name."""
    options: tuple[str, ...] = ()
    """Additional options of sbatch."""
    overrides: tuple[str, ...] = ()
    """Additional overrides of train.py."""
    is_long: bool = False
    """Whether the job must run for several minutes."""
    repair: Callable[[Job], None] | None = None
    """Repairs the fault, as an operator would."""


def _requeue(job: Job) -> None:
    job.cluster.ask("scontrol", "requeue", str(job.number))


def _preempt(job: Job) -> None:
    """Submit a short job for all nodes in a partition of higher priority."""
    nodes = len(job.cluster.nodes.names)
    job.cluster.ask(
        "sbatch", "--partition=high", f"--nodes={nodes}", "--exclusive", "--output=/dev/null",
        "--wrap=sleep 1",
    )  # fmt: skip


def _send_usr1(job: Job) -> None:
    job.cluster.ask("scancel", "--signal=USR1", str(job.number))


def _stop_file(job: Job) -> None:
    (job.run_dir / "STOP").touch()


def _shorten_time_limit(job: Job) -> None:
    """Set the time limit of the job so that it ends in one to two minutes."""
    hours, minutes, _ = job.fields["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2
    job.cluster.ask("scontrol", "update", f"jobid={job.number}", f"TimeLimit={limit}")


def _wait_for_time_limit(job: Job) -> None:
    """Do nothing: a minute after its start, only `launch.stop_minutes` are left."""


def _kill_node(job: Job) -> None:
    job.cluster.kill_node(_second_node(job))


def _start_node(job: Job) -> None:
    job.cluster.start_node(_second_node(job))


def _kill_rank(job: Job) -> None:
    os.kill(job.ranks()[TARGET_RANK], signal.SIGKILL)


def _hang_rank(job: Job) -> None:
    os.kill(job.ranks()[TARGET_RANK], signal.SIGSTOP)


def _hang_first_rank(job: Job) -> None:
    os.kill(job.ranks()[0], signal.SIGSTOP)


def _cut_link(job: Job) -> None:
    job.cluster.nodes.set_link(_second_node(job), "down")


def _repair_link(job: Job) -> None:
    time.sleep(1)
    job.cluster.nodes.set_link(_second_node(job), "up")


def _second_node(job: Job) -> str:
    return job.cluster.nodes.names[1]


FAULTS = (
    Fault("`scontrol requeue`", _requeue, ""),
    Fault("pre-emption", _preempt, "stopped after step"),
    Fault("`scancel --signal=USR1`", _send_usr1, "SIGUSR1"),
    Fault("rank killed by -9", _kill_rank, rf"rank {TARGET_RANK} \(node2\) is gone"),
    Fault("rank hangs (SIGSTOP)", _hang_rank, rf"late: rank {TARGET_RANK} \(node2\)"),
    Fault("link cut", _cut_link, r"late: rank 2 \(node2\), rank 3 \(node2\)", repair=_repair_link),
    Fault("node lost (slurmd and all)", _kill_node, r"node2|NODE FAILURE", repair=_start_node),
    Fault(
        "time limit (`--signal=USR1@60`)", _shorten_time_limit, "SIGUSR1", is_long=True,
        options=("--signal=USR1@60",), overrides=("launch.stop_minutes=0",),
    ),
    Fault("rank 0 hangs (SIGSTOP)", _hang_first_rank, r"rank 0 \(node1\).* does not answer"),
    Fault("STOP file", _stop_file, "file STOP"),
    Fault(
        "time limit (no signal)", _wait_for_time_limit, "minutes left of the Slurm job",
        is_long=True, options=("--signal=USR1@0",), overrides=("launch.stop_minutes=29",),
    ),
)  # fmt: skip
