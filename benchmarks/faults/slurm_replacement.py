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

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.faults.run_files import count_steps
from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from benchmarks.faults.slurm_lab.fault_cases import REPLACED, Fault
from benchmarks.faults.slurm_lab.jobs import (
    OPTIONS,
    OVERRIDES,
    PATIENCE_SECONDS,
    losses_of,
    pack_environment,
    submit,
)
from benchmarks.harness import bench_parser, fixed, print_table, work_folder, write_json
from frontier_llm.cli.options import run_command

STEPS = 80
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
        for number, fault in enumerate(REPLACED):
            if options.only in fault.name:
                print(f"{fault.name} ...", file=sys.stderr, flush=True)
                outcomes.append(run_job(cluster, folder / f"fault_{number}", fault, reference)[0])
                cluster.wait_idle(90)
    rows = [
        (one.fault, f"{fixed(one.seconds_to_step, 1)} s", str(one.steps_done_twice), one.job,
         "-" if one.largest_loss_difference is None else f"{one.largest_loss_difference:g}")
        for one in outcomes
    ]  # fmt: skip
    names = ["fault", "next step after", "steps done twice", "the job", "largest loss difference"]
    print_table("Ranks of a Slurm job replaced in place", names, rows)
    write_json(options, {"rows": [asdict(outcome) for outcome in outcomes]})
    return int(any(outcome.largest_loss_difference for outcome in outcomes))


def run_job(
    cluster: SlurmCluster, run_dir: Path, fault: Fault, reference: Mapping[int, float]
) -> tuple[Replaced, dict[int, float]]:
    """Run one job with a fault; return what it caused, and the losses of all steps.

    `reference` has the loss of each step without faults.
    """
    variables = {"FRONTIER_LLM_REQUEUES": str(fault.requeues)}
    variables["FRONTIER_LLM_SPARE_NODES" if fault.replaces else "FRONTIER_LLM_RESTARTS"] = "1"
    nodes = ["--nodes=3", "--no-kill"] if fault.replaces else ["--nodes=2"]
    job = submit(cluster, (*OPTIONS, *nodes), KEYS, run_dir, variables)
    job.wait(lambda: job.steps >= fault.at_step or job.ended, PATIENCE_SECONDS, "in the middle")
    seen, start = count_steps(run_dir), time.monotonic()
    fault.act(job)
    goal = "beyond the fault"
    job.wait(lambda: count_steps(run_dir) > seen + 1 or job.ended, PATIENCE_SECONDS, goal)
    seconds = time.monotonic() - start
    job.wait(lambda: job.ended, PATIENCE_SECONDS, "ended")
    if fault.repair is not None:
        fault.repair(job)
    losses, restarts = losses_of(run_dir), int(job.fields["Restarts"])
    if max(losses, default=0) < STEPS:
        print(job.output[-4000:], file=sys.stderr)
    end = f"requeued {restarts} time, then {job.end}" if restarts else job.end
    if not losses:
        return Replaced(fault.name, None, 0, end, None), losses
    again = count_steps(run_dir) - max(losses)
    worst = max((abs(losses.get(s, 9.0) - loss) for s, loss in reference.items()), default=0.0)
    return Replaced(fault.name, seconds, again, end, worst), losses


if __name__ == "__main__":
    sys.exit(run_command(main))
