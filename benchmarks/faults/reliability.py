"""Inject faults into jobs of a real Slurm; resume with another number of ranks; measure start-up.

    python -m benchmarks.faults.reliability faults    # one fault per job, on 2 nodes x 2 ranks
    python -m benchmarks.faults.reliability faults --only STOP    # faults whose name contains STOP
    python -m benchmarks.faults.reliability elastic   # one run on 4, then 2, then 3 local ranks
    python -m benchmarks.faults.reliability starts    # start-up time; store operations up to 3,072

Each experiment prints its rows as a table and writes them to --json, in the form of the files in
benchmarks/results, from which docs/reliability.md is made. `faults` needs root and the programs of
Slurm (benchmarks/faults/slurm_lab/cluster.py names the packages).
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from benchmarks.faults.slurm_lab.fault_cases import FAULTS, Fault
from benchmarks.faults.slurm_lab.jobs import ROOT, Job, losses_of, pack_environment, submit
from benchmarks.harness import bench_console, make_table
from frontier_llm.cli.options import new_file, run_command, tool_parser, written
from frontier_llm.errors import LaunchError, StopRequested
from frontier_llm.units import format_seconds

SCRIPT = "scripts/a100.sbatch"
STEPS = 100
"""Steps per job."""
LONG_SECONDS = 120.0
"""Training time of a job that reaches its time limit, which Slurm counts in minutes."""
ACT_AT_STEP = 25
"""Step after which the fault is injected; two checkpoints have been saved by then."""
OPTIONS = (
    "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=2", "--time=30",
)  # fmt: skip
OVERRIDES = (
    "cluster=cpu_laptop", "parallel.pipeline=2", "model.layers=2", "model.hidden=64",
    "model.heads=4", "data.sequence_length=64", "data.global_batch=12", "data.micro_batch=2",
    "precision=fp32", "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1",
    "trainer.sample_tokens=0", "optimizer.decay_steps=1000", "checkpoint.every_steps=10",
    "telemetry.wandb=off", "telemetry.progress=false", "watchdog.step_seconds=20",
)  # fmt: skip
PATIENCE_SECONDS = 600.0
DESCRIPTIONS = {
    "faults": "one fault per Slurm job of 2 nodes x 2 ranks, after step 25; losses compared with "
    "those of a job without faults",
    "elastic": "one run continued on 4, 2 and 3 ranks",
    "starts": "seconds to the end of a run of one step; store operations per rank under torch's "
    "fake process group",
}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The consequences of one fault."""

    fault: str
    """Name of the fault."""
    seconds_to_end: float
    """Time from the fault until Slurm had freed the nodes."""
    end: str
    """State and exit code of the job, or `requeued`."""
    seconds_to_step: float
    """Time from the restart, without the queue, until one step is complete."""
    resumed_at: int
    """Step from which the restarted job was resumed."""
    lost_steps: int
    """Number of steps that had to be repeated."""
    culprit: str
    """Text in which the job named the cause."""
    is_culprit_named: bool
    """Whether the job named the right cause, or the fault has none."""
    largest_loss_difference: float
    """Largest difference from the reference run over all steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the experiments; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "experiment", choices=("faults", "elastic", "starts"), help="experiment, see above"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/reliability"),
        help="folder of the runs (%(default)s)",
    )
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument(
        "--json", type=new_file, help="file for the rows (EXPERIMENT.result.json in --folder)"
    )
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.experiment == "starts":
        from benchmarks.faults.slurm_lab.starts import starts

        measured = starts(folder)
    elif chosen.experiment == "elastic":
        measured = {"rows": elastic(folder)}
    else:
        wanted = [fault for fault in FAULTS if chosen.only in fault.name]
        measured = {"rows": on_cluster(folder, lambda cluster: faults(cluster, folder, wanted))}
    file = chosen.json or folder / f"{chosen.experiment}.result.json"
    with written(file, "--json"):
        file.write_text(json.dumps(result(chosen.experiment, measured), indent=1) + "\n")
    for rows in measured.values():
        keys = list(rows[0]) if rows else []
        cells = [[str(value) for value in row.values()] for row in rows]
        bench_console().print(
            make_table("", [key.replace("_", " ") for key in keys], cells, left=len(keys))
        )
    print(
        f"{file}: the rows. To publish them: `--json benchmarks/results/{chosen.experiment}.json`,"
    )
    print("then `python -m docs.generate measured --write`")
    return 0


def result(experiment: str, measured: dict[str, Rows]) -> dict[str, Any]:
    """Return the rows with command, hardware and date, in the form of benchmarks/results."""
    return {
        "command": f"python -m benchmarks.faults.reliability {experiment}",
        "what": DESCRIPTIONS[experiment],
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "date": date.today().isoformat(),
        **measured,
    }


def on_cluster(folder: Path, work: Callable[[SlurmCluster], Rows]) -> Rows:
    """Start a cluster of two nodes, call `work` with it, and stop it."""
    local = folder / "local"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    with SlurmCluster(folder / "slurm", 2, 4, 2, local) as cluster:
        pack_environment(cluster.folder)
        return work(cluster)


def faults(cluster: SlurmCluster, folder: Path, wanted: Sequence[Fault]) -> Rows:
    """Inject each fault into a job, and compare its losses with those of a reference job.

    Faults whose outcome is in the folder already are not repeated.
    """
    file = folder / "faults.json"
    found = json.loads(file.read_text()) if file.exists() else []
    outcomes = {values["fault"]: Outcome(**values) for values in found}
    reference = reference_losses(cluster, folder / "reference")
    for number, fault in enumerate(FAULTS):
        if fault not in wanted or fault.name in outcomes:
            continue
        print(f"{fault.name} ...", file=sys.stderr, flush=True)
        outcomes[fault.name] = inject(cluster, fault, folder / f"fault_{number}", reference)
        cluster.wait_idle(60)
        file.write_text(json.dumps([asdict(outcome) for outcome in outcomes.values()], indent=1))
    return [_row(outcomes[fault.name]) for fault in FAULTS if fault.name in outcomes]


def reference_losses(cluster: SlurmCluster, run_dir: Path) -> dict[int, float]:
    """Return the losses of a job without faults, over the steps of the longest job."""
    done = run_dir.with_suffix(".done")
    if done.exists():
        return losses_of(run_dir)
    job = submit(cluster, SCRIPT, OPTIONS, (*OVERRIDES, "trainer.steps=1000000"), run_dir)
    job.wait(lambda: job.steps >= 1 or job.ended, PATIENCE_SECONDS, "in the middle")
    time.sleep(LONG_SECONDS)
    job.wait(lambda: job.steps >= STEPS or job.ended, PATIENCE_SECONDS, "far enough")
    (run_dir / "STOP").touch()
    job.wait(lambda: job.ended, PATIENCE_SECONDS, "ended")
    if job.exit_code != StopRequested.exit_code or job.steps < STEPS:
        raise LaunchError(f"the reference job failed:\n{job.output[-3000:]}")
    done.touch()
    return job.losses


def inject(
    cluster: SlurmCluster, fault: Fault, run_dir: Path, reference: dict[int, float]
) -> Outcome:
    """Inject one fault into one job, wait for its end, and restart it until it is complete."""
    steps = max(reference) if fault.is_long else STEPS
    common = (*OVERRIDES, f"trainer.steps={steps}")
    options, overrides = (*OPTIONS, *fault.options), (*common, *fault.overrides)
    job = submit(cluster, SCRIPT, options, overrides, run_dir)
    job.wait(lambda: job.steps >= ACT_AT_STEP or job.ended, PATIENCE_SECONDS, "in the middle")
    fault.act(job)
    seconds = job.wait(lambda: _off_the_nodes(job), PATIENCE_SECONDS, "off its nodes")
    end, reached = _end(job), job.steps
    if reached == steps:
        raise LaunchError(f"{fault.name}: the job was complete before the fault stopped it")
    before = len(_resumptions(job.output))
    if fault.repair is not None:
        fault.repair(job)
    start, restarted = _restart(cluster, job, fault, common)
    restarted.wait(
        lambda: _has_resumed(restarted, before) or restarted.ended, PATIENCE_SECONDS, "resumed"
    )
    seconds_to_step = time.monotonic() - start
    restarted.wait(lambda: restarted.ended, PATIENCE_SECONDS, "ended again")
    if restarted.exit_code or restarted.steps != steps:
        raise LaunchError(f"{fault.name}: the job did not resume:\n{restarted.output[-3000:]}")
    resumed_at = _resumptions(restarted.output)[-1]
    # read now: ranks may have written after Slurm had freed the nodes
    named = re.search(fault.culprit, job.output) if fault.culprit else None
    losses = restarted.losses
    return Outcome(
        fault=fault.name,
        seconds_to_end=seconds,
        end=end,
        seconds_to_step=seconds_to_step,
        resumed_at=resumed_at,
        lost_steps=max(0, reached - resumed_at),
        culprit=named[0] if named else "",
        is_culprit_named=named is not None or not fault.culprit,
        largest_loss_difference=max(
            abs(losses[step] - reference[step]) for step in range(1, steps + 1)
        ),
    )


def elastic(folder: Path) -> Rows:
    """Train on 4, then 2, then 3 ranks of this machine; compare with a run on 4 ranks."""
    runs = Path(tempfile.mkdtemp(prefix="elastic_", dir=folder))
    reference, run_dir = runs / "reference", runs / "elastic"
    _train(reference, 4, STEPS)
    expected = _ledger(reference)
    rows: Rows = []
    first = 1
    for ranks, until in ((4, 25), (2, 60), (3, STEPS)):
        micro_batch = _train(run_dir, ranks, until)
        found = {step: row for step, row in _ledger(run_dir).items() if step >= first}
        alike = all(row["digest"] == expected[step]["digest"] for step, row in found.items())
        losses = [abs(row["loss"] - expected[step]["loss"]) for step, row in found.items()]
        rows.append(
            {
                "ranks": ranks,
                "micro_batch": micro_batch,
                "steps": f"{first} to {max(found)}",
                "samples_as_undisturbed": alike,
                "largest_loss_difference": float(f"{max(losses):.2g}"),
            }
        )
        first = max(found) + 1
    return rows


def _train(run_dir: Path, ranks: int, until: int) -> int:
    """Train or resume in a run directory until a step; return the micro-batch size."""
    overrides = [
        *OVERRIDES, f"trainer.steps={STEPS}", "parallel.pipeline=1", "launch.elastic=true",
        f"launch.ranks={ranks}", f"run.dir={run_dir}",
    ]  # fmt: skip
    command = [sys.executable, "train.py", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and until < STEPS:
        if max(losses_of(run_dir), default=0) >= until:
            (run_dir / "STOP").touch()
            break
        time.sleep(0.1)
    if process.wait() not in (0, 3):
        raise LaunchError(f"the run on {ranks} ranks failed, see {run_dir}/failures")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    return int(config["data"]["micro_batch"])


def _ledger(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return digest and loss of every step; of a repeated step, the later ones."""
    lines = (run_dir / "ledger.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = losses_of(run_dir)
    return {row["step"]: {**row, "loss": losses[row["step"]]} for row in rows if "digest" in row}


def _off_the_nodes(job: Job) -> bool:
    """Return whether Slurm has freed the nodes: the job has ended, or waits for its restart."""
    fields = job.fields
    return job.ended or int(fields.get("Restarts", "0")) > 0 or fields["JobState"] == "PENDING"


def _end(job: Job) -> str:
    if not job.ended:
        return "requeued"
    return f"{job.fields['JobState'].lower()}, exit code {job.exit_code}"


def _restart(
    cluster: SlurmCluster, job: Job, fault: Fault, overrides: Sequence[str]
) -> tuple[float, Job]:
    """Restart the job as soon as its nodes are idle; return when it could start, and the job."""
    cluster.wait_idle(90)
    if job.ended:
        return time.monotonic(), submit(cluster, SCRIPT, OPTIONS, overrides, job.run_dir)
    # Slurm delays a requeued job by two minutes. After the loss of a node this delay is needed:
    # when the node answers again, Slurm ends all processes of this job there, old and new ones.
    if fault.repair is None:
        cluster.ask("scontrol", "update", f"jobid={job.number}", "StartTime=now")
    else:
        job.wait(lambda: job.fields["JobState"] == "RUNNING", PATIENCE_SECONDS, "running again")
    return time.monotonic(), job


def _has_resumed(job: Job, before: int) -> bool:
    found = _resumptions(job.output)
    return len(found) > before and job.steps > found[-1]


def _resumptions(output: str) -> list[int]:
    """Return the step from which each start of a job was resumed."""
    return [int(step) for step in re.findall(r"resumed +.*?step (\d+)", output)]


def _row(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome in the form of benchmarks/results/faults.json."""
    cause = outcome.culprit or None
    return {
        "fault": outcome.fault,
        "nodes_free_after": format_seconds(outcome.seconds_to_end),
        "job": outcome.end,
        "first_new_step_after": format_seconds(outcome.seconds_to_step),
        "steps_done_twice": outcome.lost_steps,
        "culprit": cause if outcome.is_culprit_named else "not named",
        "largest_loss_difference": float(f"{outcome.largest_loss_difference:.2g}"),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
