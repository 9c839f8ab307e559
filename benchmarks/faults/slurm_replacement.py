"""Kill ranks and nodes of jobs of a real Slurm whose ranks are replaced while the others wait.

    python -m benchmarks.faults.slurm_replacement                # about 10 minutes, as root
    python -m benchmarks.faults.slurm_replacement --only link    # faults whose name contains "link"

Slurm runs on three simulated nodes of this machine (benchmarks/faults/slurm_lab). Each job is
`sbatch --no-kill scripts/a100.sbatch` with FRONTIER_LLM_SPARE_NODES=1: two nodes of two ranks train
with 4 replicas and sharding.optimizer=2, and the third node waits. One fault is injected after step
25, and the job trains on to step 80. Its losses are compared with those of a run without faults.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.faults.reliability import OVERRIDES, PATIENCE_SECONDS, SCRIPT
from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from benchmarks.faults.slurm_lab.jobs import Job, losses_of, pack_environment, submit
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import bench_parser, run_command

STEPS, ACT_AT_STEP = 80, 25
OPTIONS = (
    "--nodes=3", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2", "--time=30",
    "--no-kill",
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
    seconds_to_step: float
    """From the fault to the end of the next step."""
    steps_done_twice: int
    """Number of steps that the job has repeated."""
    job: str
    """How the job ended."""
    largest_loss_difference: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject the faults; return the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="slurm_replacement_"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    outcomes = []
    with SlurmCluster(folder / "slurm", 3, 4, 2, folder / "local") as cluster:
        pack_environment(cluster.folder)
        reference = run_job(cluster, folder / "reference", "", lambda job: None)[1]
        for number, (name, act, repair) in enumerate(FAULTS):
            if options.only not in name:
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            outcome, losses = run_job(cluster, folder / f"fault_{number}", name, act)
            repair(cluster)
            worst = max(abs(losses[s] - reference[s]) if s in losses else 9.0 for s in reference)
            outcomes.append(Replaced(**{**asdict(outcome), "largest_loss_difference": worst}))
            cluster.wait_idle(90)
    wide_console().print(to_table(outcomes))
    if options.json:
        rows = [asdict(outcome) for outcome in outcomes]
        options.json.write_text(json.dumps({"rows": rows, "cores": os.cpu_count()}, indent=1))
    return int(any(outcome.largest_loss_difference > 0 for outcome in outcomes))


def run_job(
    cluster: SlurmCluster, run_dir: Path, name: str, act: Callable[[Job], None]
) -> tuple[Replaced, dict[int, float]]:
    """Run one job with a fault; return what it caused, and the losses of all steps."""
    variables = {"FRONTIER_LLM_SPARE_NODES": "1"}
    job = submit(cluster, SCRIPT, OPTIONS, KEYS, run_dir, variables)
    job.wait(lambda: job.steps >= ACT_AT_STEP or job.ended, PATIENCE_SECONDS, "in the middle")
    before, seen = job.steps, ledger_lines(run_dir)
    start = time.monotonic()
    act(job)
    goal = "beyond the fault"
    job.wait(lambda: ledger_lines(run_dir) > seen + 1 or job.ended, PATIENCE_SECONDS, goal)
    seconds = time.monotonic() - start
    job.wait(lambda: job.ended, PATIENCE_SECONDS, "ended")
    losses = losses_of(run_dir)
    if max(losses, default=0) < STEPS:
        print(job.output[-4000:], file=sys.stderr)
    again = ledger_lines(run_dir) - max(losses, default=0)
    end = f"{job.fields['JobState'].lower()}, exit code {job.exit_code}"
    print(f"  after step {before}: {seconds:.1f} s, {end}", file=sys.stderr)
    return Replaced(name, seconds, again, end, 0.0), losses


def ledger_lines(run_dir: Path) -> int:
    """Return the number of steps in the ledger; a step that was done twice counts twice."""
    try:
        return (run_dir / "ledger.jsonl").read_text().count("digest")
    except OSError:
        return 0


def process_of(job: Job, rank: int) -> int:
    """Return the process id of a rank."""
    lines = (job.run_dir / "ranks.jsonl").read_text().splitlines()
    return int([e for e in map(json.loads, lines) if e["rank"] == rank][-1]["pid"])


def _kill(rank: int) -> Callable[[Job], None]:
    return lambda job: os.kill(process_of(job, rank), signal.SIGKILL)


def _nothing(_: SlurmCluster) -> None:
    """Repair nothing."""


FAULTS: tuple[tuple[str, Callable[[Job], None], Callable[[SlurmCluster], None]], ...] = (
    ("rank killed by -9", _kill(3), _nothing),
    ("rank 0 killed by -9", _kill(0), _nothing),
    (
        "rank hangs (SIGSTOP)",
        lambda job: os.kill(process_of(job, 3), signal.SIGSTOP),
        _nothing,
    ),
    (
        "node lost (slurmd and all)",
        lambda job: job.cluster.kill_node("node2"),
        lambda cluster: cluster.start_node("node2"),
    ),
    (
        "link cut",
        lambda job: job.cluster.nodes.set_link("node2", "down"),
        lambda cluster: cluster.nodes.set_link("node2", "up"),
    ),
)


def to_table(outcomes: Sequence[Replaced]) -> Table:
    """Return the outcomes as a table."""
    names = ("fault", "next step after", "steps done twice", "the job", "largest loss difference")
    table = Table(*names, title="Ranks of a Slurm job replaced in place")
    for outcome in outcomes:
        seconds, worst = f"{outcome.seconds_to_step:.1f} s", f"{outcome.largest_loss_difference:g}"
        table.add_row(outcome.fault, seconds, str(outcome.steps_done_twice), outcome.job, worst)
    return table


if __name__ == "__main__":
    sys.exit(run_command(main))
