"""Kill ranks and nodes of jobs of a real Slurm whose ranks are replaced while the others wait.

    python -m benchmarks.faults.slurm_replacement                # about 20 minutes, as root
    python -m benchmarks.faults.slurm_replacement --only link    # faults whose name contains "link"

Slurm runs on three simulated nodes of this machine (benchmarks/faults/slurm_lab). Each job is
`sbatch --no-kill scripts/a100.sbatch` with FRONTIER_LLM_SPARE_NODES=1: two nodes of two ranks train
with 4 replicas and sharding.optimizer=2, and the third node waits. One fault is injected after step
25, and the job trains on to step 80. Its losses are compared with those of a run without faults.

Two faults need FRONTIER_LLM_REQUEUES=1: the node of task 0 is lost, and a rank dies at every start,
also after the job has been requeued. After a lost node, Slurm waits two minutes before it starts a
requeued job. In the last job no ranks are replaced; the job script starts all ranks again
(FRONTIER_LLM_RESTARTS=1).
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.faults.reliability import OVERRIDES, PATIENCE_SECONDS, SCRIPT
from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from benchmarks.faults.slurm_lab.jobs import Job, losses_of, pack_environment, submit
from benchmarks.harness import (
    bench_console,
    bench_parser,
    make_table,
    work_folder,
    write_json,
)
from frontier_llm.cli.options import run_command

STEPS, ACT_AT_STEP = 80, 25
OPTIONS = (
    "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2", "--time=30",
)  # fmt: skip
KEYS = (
    *OVERRIDES, "parallel.pipeline=1", "data.micro_batch=1", "sharding.params=1",
    "sharding.grads=1", "sharding.optimizer=2", f"trainer.steps={STEPS}",
)  # fmt: skip
"""The optimizer states are divided over the two ranks of a node, and each node has all of them."""


@dataclass(frozen=True)
class Replaced:
    """What one fault has caused."""

    fault: str
    seconds_to_step: float | None
    """From the fault to the end of the next step; None if there was none."""
    steps_done_twice: int
    """Number of steps that the job has repeated."""
    job: str
    """How the job ended."""
    largest_loss_difference: float | None
    """Compared with a run without faults; None if no step was done."""


@dataclass(frozen=True)
class Fault:
    """A fault of a job."""

    name: str
    act: Callable[[Job], None]
    """Injects the fault."""
    repair: Callable[[SlurmCluster], None] = lambda _: None
    """Repairs the cluster after the job."""
    requeues: int = 0
    """Value of FRONTIER_LLM_REQUEUES."""
    at_step: int = ACT_AT_STEP
    """Step after which the fault is injected."""
    replaces: bool = True
    """Whether ranks are replaced; else all ranks are started again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject the faults; return the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    options = parser.parse_args(arguments)
    outcomes = []
    with (
        work_folder("slurm_replacement") as folder,
        SlurmCluster(folder / "slurm", 3, 4, 2, folder / "local") as cluster,
    ):
        pack_environment(cluster.folder)
        nothing = Fault("", lambda job: None)
        reference = run_job(cluster, folder / "reference", nothing, {})[1]
        for number, fault in enumerate(FAULTS):
            if options.only not in fault.name:
                continue
            print(f"{fault.name} ...", file=sys.stderr, flush=True)
            outcomes.append(run_job(cluster, folder / f"fault_{number}", fault, reference)[0])
            fault.repair(cluster)
            cluster.wait_idle(90)
    names = ["fault", "next step after", "steps done twice", "the job", "largest loss difference"]
    rows = []
    for one in outcomes:
        seconds, worst = one.seconds_to_step, one.largest_loss_difference
        rows.append(
            (one.fault, "-" if seconds is None else f"{seconds:.1f} s", str(one.steps_done_twice),
             one.job, "-" if worst is None else f"{worst:g}")
        )  # fmt: skip
    bench_console().print(make_table("Ranks of a Slurm job replaced in place", names, rows))
    write_json(options, {"rows": [asdict(outcome) for outcome in outcomes]})
    return int(any(outcome.largest_loss_difference for outcome in outcomes))


def run_job(
    cluster: SlurmCluster, run_dir: Path, fault: Fault, reference: Mapping[int, float]
) -> tuple[Replaced, dict[int, float]]:
    """Run one job with a fault; return what it caused, and the losses of all steps.

    Args:
        cluster: the cluster.
        run_dir: run directory.
        fault: the fault.
        reference: loss of each step without faults.
    """
    variables = {"FRONTIER_LLM_REQUEUES": str(fault.requeues)}
    variables["FRONTIER_LLM_SPARE_NODES" if fault.replaces else "FRONTIER_LLM_RESTARTS"] = "1"
    nodes = ["--nodes=3", "--no-kill"] if fault.replaces else ["--nodes=2"]
    job = submit(cluster, SCRIPT, (*OPTIONS, *nodes), KEYS, run_dir, variables)
    job.wait(lambda: job.steps >= fault.at_step or job.ended, PATIENCE_SECONDS, "in the middle")
    before, seen = job.steps, ledger_lines(run_dir)
    start = time.monotonic()
    fault.act(job)
    goal = "beyond the fault"
    job.wait(lambda: ledger_lines(run_dir) > seen + 1 or job.ended, PATIENCE_SECONDS, goal)
    seconds = time.monotonic() - start
    job.wait(lambda: job.ended, PATIENCE_SECONDS, "ended")
    losses, fields = losses_of(run_dir), job.fields
    if max(losses, default=0) < STEPS:
        print(job.output[-4000:], file=sys.stderr)
    again = ledger_lines(run_dir) - max(losses, default=0)
    end = f"{fields['JobState'].lower()}, exit code {job.exit_code}"
    end = f"requeued {fields['Restarts']} time, then {end}" if int(fields["Restarts"]) else end
    print(f"  after step {before}: {seconds:.1f} s, {end}", file=sys.stderr)
    if not losses:
        return Replaced(fault.name, None, 0, end, None), losses
    worst = max((abs(losses.get(s, 9.0) - loss) for s, loss in reference.items()), default=0.0)
    return Replaced(fault.name, seconds, again, end, worst), losses


def ledger_lines(run_dir: Path) -> int:
    """Return the number of steps in the ledger; a step that was done twice counts twice."""
    try:
        return (run_dir / "ledger.jsonl").read_text().count("digest")
    except OSError:
        return 0


def process_of(job: Job, rank: int) -> int:
    """Return the process id of a rank; 0 if no process has got it yet."""
    file = job.run_dir / "ranks.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(([0] + [e["pid"] for e in map(json.loads, lines) if e["rank"] == rank])[-1])


def _kill(rank: int) -> Callable[[Job], None]:
    return lambda job: os.kill(process_of(job, rank), signal.SIGKILL)


def _lose_first_node(job: Job) -> None:
    """Kill the node of task 0 and of the job script; start it again once the job is requeued."""
    job.cluster.kill_node("node1")
    goal = "in the queue again"
    job.wait(lambda: job.fields["JobState"] == "PENDING", PATIENCE_SECONDS, goal)
    print(job.output.splitlines()[-1], file=sys.stderr)
    job.cluster.start_node("node1")


def _kill_at_every_start(job: Job) -> None:
    """Kill the process of rank 3 as soon as it has got its rank, until the job has ended."""
    killed, looked = set(), 0.0
    while True:
        pid = process_of(job, 3)
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
    Fault("rank killed by -9", _kill(3)),
    Fault("rank 0 killed by -9", _kill(0)),
    Fault("rank hangs (SIGSTOP)", lambda job: os.kill(process_of(job, 3), signal.SIGSTOP)),
    Fault(
        "node lost (slurmd and all)",
        lambda job: job.cluster.kill_node("node2"),
        lambda cluster: cluster.start_node("node2"),
    ),
    Fault(
        "link cut",
        lambda job: job.cluster.nodes.set_link("node2", "down"),
        lambda cluster: cluster.nodes.set_link("node2", "up"),
    ),
    Fault("node of task 0 lost, with the job script", _lose_first_node, requeues=1),
    Fault("rank dies at every start", _kill_at_every_start, requeues=1, at_step=0),
    Fault(
        "rank hangs (SIGSTOP), and all ranks are started again",
        lambda job: os.kill(job.ranks()[3], signal.SIGSTOP),
        replaces=False,
    ),
)


if __name__ == "__main__":
    sys.exit(run_command(main))
