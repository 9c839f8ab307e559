"""What is done to a running job, and what must be seen of it."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tools.slurm_lab.jobs import Job

VICTIM = 3
"""The rank that suffers: the last of four, on the second node of the job."""


@dataclass(frozen=True)
class Fault:
    """One thing that happens to jobs."""

    name: str
    act: Callable[[Job], None]
    culprit: str
    """Regular expression of what the job must say; empty: nothing is to be blamed."""
    options: tuple[str, ...] = ()
    """Of sbatch, beside the usual ones."""
    overrides: tuple[str, ...] = ()
    is_long: bool = False
    """Whether it needs a job of some minutes."""
    mend: Callable[[Job], None] | None = None
    """What operators do to a node that was lost."""


def _requeue(job: Job) -> None:
    job.cluster.ask("scontrol", "requeue", str(job.number))


def _preempt(job: Job) -> None:
    """Want all nodes, from the partition that goes before, for a moment."""
    nodes = len(job.cluster.nodes.names)
    job.cluster.ask(
        "sbatch", "--partition=high", f"--nodes={nodes}", "--exclusive", "--output=/dev/null",
        "--wrap=sleep 1",
    )  # fmt: skip


def _usr1(job: Job) -> None:
    job.cluster.ask("scancel", "--signal=USR1", str(job.number))


def _stop_file(job: Job) -> None:
    (job.run_dir / "STOP").touch()


def _shorten(job: Job) -> None:
    """End the job in a minute or so: Slurm counts time limits in minutes."""
    hours, minutes, _ = job.fields["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2
    job.cluster.ask("scontrol", "update", f"jobid={job.number}", f"TimeLimit={limit}")


def _wait_for_the_clock(job: Job) -> None:
    """Do nothing: a minute after its start the job has `launch.stop_minutes` left."""


def _kill_node(job: Job) -> None:
    job.cluster.kill_node(_second_node(job))


def _start_node(job: Job) -> None:
    job.cluster.start_node(_second_node(job))


def _kill_rank(job: Job) -> None:
    os.kill(job.ranks()[VICTIM], signal.SIGKILL)


def _hang_rank(job: Job) -> None:
    os.kill(job.ranks()[VICTIM], signal.SIGSTOP)


def _hang_first_rank(job: Job) -> None:
    os.kill(job.ranks()[0], signal.SIGSTOP)


def _cut_link(job: Job) -> None:
    job.cluster.nodes.set_link(_second_node(job), "down")


def _mend_link(job: Job) -> None:
    time.sleep(1)
    job.cluster.nodes.set_link(_second_node(job), "up")


def _second_node(job: Job) -> str:
    return job.cluster.nodes.names[1]


FAULTS = (
    Fault("`scontrol requeue`", _requeue, ""),
    Fault("pre-emption", _preempt, "stopped after step"),
    Fault("`scancel --signal=USR1`", _usr1, "SIGUSR1"),
    Fault("rank killed by -9", _kill_rank, rf"rank {VICTIM} \(node2\) is gone"),
    Fault("rank hangs (SIGSTOP)", _hang_rank, rf"late: rank {VICTIM} \(node2\)"),
    Fault("link cut", _cut_link, r"late: rank 2 \(node2\), rank 3 \(node2\)", mend=_mend_link),
    Fault("node lost (slurmd and all)", _kill_node, r"node2|NODE FAILURE", mend=_start_node),
    Fault(
        "time limit (`--signal=USR1@60`)", _shorten, "SIGUSR1", is_long=True,
        options=("--signal=USR1@60",), overrides=("launch.stop_minutes=0",),
    ),
    Fault("rank 0 hangs (SIGSTOP)", _hang_first_rank, r"rank 0 \(node1\).* does not answer"),
    Fault("STOP file", _stop_file, "file STOP"),
    Fault(
        "time limit (no signal)", _wait_for_the_clock, "minutes left of the Slurm job",
        is_long=True, options=("--signal=USR1@0",), overrides=("launch.stop_minutes=29",),
    ),
)  # fmt: skip
