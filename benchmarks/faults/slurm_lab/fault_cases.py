"""The faults that are injected into running jobs, and how a job's output must name each cause."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.slurm_lab.jobs import PATIENCE_SECONDS, Job

TARGET_RANK = 3
"""The rank that is killed or stopped: the last of four, on the second node of the job."""
ACT_AT_STEP = 25
"""Step after which a fault is injected; two checkpoints have been saved by then."""


@dataclass(frozen=True)
class Fault:
    """One fault of a job."""

    name: str
    """Name in the table."""
    act: Callable[[Job], object]
    """Injects the fault into a running job."""
    culprit: str = ""
    """Regular expression that must match in the job's output; empty: there is no cause to name."""
    options: tuple[str, ...] = ()
    """Additional options of sbatch."""
    overrides: tuple[str, ...] = ()
    """Additional overrides of train.py."""
    is_long: bool = False
    """Whether the job must run for several minutes."""
    repair: Callable[[Job], None] | None = None
    """Repairs the fault, as an operator would."""
    requeues: int = 0
    """Value of FRONTIER_LLM_REQUEUES."""
    at_step: int = ACT_AT_STEP
    """Step after which the fault is injected."""
    replaces: bool = True
    """Whether ranks are replaced; else all ranks are started again."""


def process_of(job: Job, rank: int) -> int:
    """Return the process id of a rank that can be replaced; 0 if no process has got it yet."""
    file = job.run_dir / "ranks.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(([0] + [e["pid"] for e in map(json.loads, lines) if e["rank"] == rank])[-1])


def _preempt(job: Job) -> None:
    """Submit a short job for all nodes in a partition of higher priority."""
    nodes = len(job.cluster.nodes.names)
    job.cluster.ask(
        "sbatch", "--partition=high", f"--nodes={nodes}", "--exclusive", "--output=/dev/null",
        "--wrap=sleep 1",
    )  # fmt: skip


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


def _signal_rank(rank: int, number: int) -> Callable[[Job], None]:
    return lambda job: os.kill(job.ranks()[rank], number)


def _signal_holder(rank: int, number: int) -> Callable[[Job], None]:
    """Send a signal to the process that holds a rank, of which others may wait."""
    return lambda job: os.kill(process_of(job, rank), number)


def _cut_link(job: Job) -> None:
    job.cluster.nodes.set_link(_second_node(job), "down")


def _repair_link(job: Job) -> None:
    time.sleep(1)
    job.cluster.nodes.set_link(_second_node(job), "up")


def _second_node(job: Job) -> str:
    return job.cluster.nodes.names[1]


def _lose_first_node(job: Job) -> None:
    """Kill the node of task 0 and of the job script; start it again once the job is requeued."""
    job.cluster.kill_node("node1")
    goal = "in the queue again"
    job.wait(lambda: job.fields["JobState"] == "PENDING", PATIENCE_SECONDS, goal)
    print(job.output.splitlines()[-1], file=sys.stderr)
    job.cluster.start_node("node1")


def _kill_at_every_start(job: Job) -> None:
    """Kill the process of the target as soon as it has got its rank, until the job has ended."""
    killed, looked = set(), 0.0
    while True:
        pid = process_of(job, TARGET_RANK)
        if pid and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() - looked > 1:
            looked = time.monotonic()
            if job.ended:
                return
            if job.fields["JobState"] == "PENDING" and killed:
                job.cluster.ask("scontrol", "update", f"jobid={job.number}", "StartTime=now")
        time.sleep(0.01)


FAULTS = (
    Fault("`scontrol requeue`",
          lambda job: job.cluster.ask("scontrol", "requeue", str(job.number))),
    Fault("pre-emption", _preempt, "stopped after step"),
    Fault("`scancel --signal=USR1`",
          lambda job: job.cluster.ask("scancel", "--signal=USR1", str(job.number)),
          "SIGUSR1"),
    Fault("rank killed by -9", _signal_rank(TARGET_RANK, signal.SIGKILL),
          rf"rank {TARGET_RANK} \(node2\) is gone"),
    Fault("rank hangs (SIGSTOP)", _signal_rank(TARGET_RANK, signal.SIGSTOP),
          rf"late: rank {TARGET_RANK} \(node2\)"),
    Fault("link cut", _cut_link, r"late: rank 2 \(node2\), rank 3 \(node2\)", repair=_repair_link),
    Fault("node lost (slurmd and all)", _kill_node, r"node2|NODE FAILURE", repair=_start_node),
    Fault("time limit (`--signal=USR1@60`)", _shorten_time_limit, "SIGUSR1", is_long=True,
          options=("--signal=USR1@60",), overrides=("launch.stop_minutes=0",)),
    Fault("rank 0 hangs (SIGSTOP)", _signal_rank(0, signal.SIGSTOP),
          r"rank 0 \(node1\).* does not answer"),
    Fault("STOP file", lambda job: (job.run_dir / "STOP").touch(), "file STOP"),
    Fault("time limit (no signal)", _wait_for_time_limit, "minutes left of the Slurm job",
          is_long=True, options=("--signal=USR1@0",), overrides=("launch.stop_minutes=29",)),
)  # fmt: skip
"""Faults after which a job ends and is restarted."""
REPLACED = (
    Fault("rank killed by -9", _signal_holder(TARGET_RANK, signal.SIGKILL)),
    Fault("rank 0 killed by -9", _signal_holder(0, signal.SIGKILL)),
    Fault("rank hangs (SIGSTOP)", _signal_holder(TARGET_RANK, signal.SIGSTOP)),
    Fault("node lost (slurmd and all)", _kill_node, repair=_start_node),
    Fault("link cut", _cut_link, repair=_repair_link),
    Fault("node of task 0 lost, with the job script", _lose_first_node, requeues=1),
    Fault("rank dies at every start", _kill_at_every_start, requeues=1, at_step=0),
    Fault("rank hangs (SIGSTOP), and all ranks are started again",
          _signal_rank(TARGET_RANK, signal.SIGSTOP), replaces=False),
)  # fmt: skip
"""Faults after which the job goes on, because its ranks are replaced."""
