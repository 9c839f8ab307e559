"""Inject faults into jobs of a real Slurm; resume with another number of ranks; measure start-up.

    python -m benchmarks.faults.reliability faults    # one fault per job, on 2 nodes x 2 ranks
    python -m benchmarks.faults.reliability faults --only STOP    # faults whose name contains STOP
    python -m benchmarks.faults.reliability replaced  # one fault per job, whose ranks are replaced
    python -m benchmarks.faults.reliability elastic   # one run on 4, then 2, then 3 local ranks
    python -m benchmarks.faults.reliability starts    # start-up time; store operations up to 3,072

Each experiment prints its rows as a table and writes them to --json, in the form of the files in
benchmarks/results, from which docs/reliability.md and docs/recovery.md are made. `faults` and
`replaced` need root and the programs of Slurm (benchmarks/faults/slurm_lab/cluster.py names the
packages).

The jobs of `replaced` are `sbatch --no-kill scripts/a100.sbatch` on three nodes, with
FRONTIER_LLM_SPARE_NODES=1: two nodes of two ranks train with 4 replicas and sharding.optimizer=2,
and the third node waits. Two faults need FRONTIER_LLM_REQUEUES=1: the node of task 0 is lost, and a
rank dies at every start, also after the job has been requeued. After a lost node, Slurm waits two
minutes before it starts a requeued job. In the last job no ranks are replaced; the job script
starts all ranks again (FRONTIER_LLM_RESTARTS=1). The exit code is 1 if a loss differs from that of
a job without faults.
"""

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.disturbed_runs import DisturbedRun
from benchmarks.faults.run_files import count_steps, read_samples, read_steps
from benchmarks.faults.slurm_lab.cluster import SlurmCluster
from benchmarks.faults.slurm_lab.fault_cases import ACT_AT_STEP, FAULTS, REPLACED, Fault
from benchmarks.faults.slurm_lab.jobs import (
    OPTIONS,
    OVERRIDES,
    PATIENCE_SECONDS,
    Job,
    losses_of,
    pack_environment,
    submit,
)
from benchmarks.harness import about, bench_parser, print_table
from benchmarks.testbed.forked_run import import_training
from frontier_lab.option_values import write_json
from frontier_llm.cli.options import run_command
from frontier_llm.errors import LaunchError, StopRequested
from frontier_llm.units import format_seconds

STEPS = 100
"""Steps per job."""
REPLACED_STEPS = 80
"""Steps per job whose ranks are replaced."""
REPLACED_KEYS = (
    *OVERRIDES, "parallel.pipeline=1", "data.micro_batch=1", "sharding.params=1",
    "sharding.grads=1", "sharding.optimizer=2", f"trainer.steps={REPLACED_STEPS}",
)  # fmt: skip
"""The optimizer states are divided over the two ranks of a node, and each node has all of them."""
LONG_SECONDS = 120.0
"""Training time of a job that reaches its time limit, which Slurm counts in minutes."""
NODES = "--nodes=2"
DESCRIPTIONS = {
    "faults": "one fault per Slurm job of 2 nodes x 2 ranks, after step 25; losses compared with "
    "those of a job without faults",
    "replaced": "one fault per Slurm job of 2 nodes x 2 ranks and one that waits; losses compared "
    "with those of a job without faults",
    "elastic": "one run continued on 4, 2 and 3 ranks",
    "starts": "seconds to the end of a run of one step; store operations per rank under torch's "
    "fake process group",
}
Rows = list[dict[str, Any]]
Losses = Mapping[int, float]
"""Loss of each step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the experiments; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("experiment", choices=DESCRIPTIONS, help="experiment, see above")
    add("--folder", type=Path, default=Path("runs/reliability"), help="of the runs (%(default)s)")
    add("--only", default="", help="only faults whose name contains this text")
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{chosen.experiment}_", dir=chosen.folder.absolute()))
    if chosen.experiment == "starts":
        from benchmarks.faults.slurm_lab.starts import starts

        measured = starts(folder)
    elif chosen.experiment == "elastic":
        import_training()
        measured = {"rows": elastic(folder)}
    elif chosen.experiment == "replaced":
        measured = {"rows": on_slurm(folder, 3, REPLACED, chosen.only, replaced_reference, replace)}
    else:
        measured = {"rows": on_slurm(folder, 2, FAULTS, chosen.only, reference_losses, inject)}
    for rows in measured.values():
        keys = list(rows[0]) if rows else []
        cells = [[str(value) for value in row.values()] for row in rows]
        print_table("", [key.replace("_", " ") for key in keys], cells, left=len(keys))
    file = chosen.json or folder / f"{chosen.experiment}.json"
    write_json(file, result(chosen.experiment, measured), "--json")
    print(f"{file}: the rows. Copy it to benchmarks/results/{chosen.experiment}.json to publish")
    print("them, then `python -m docs.generate measured --write`")
    of_replaced = measured["rows"] if chosen.experiment == "replaced" else []
    return int(any(row["largest_loss_difference"] for row in of_replaced))


def result(experiment: str, measured: dict[str, Rows]) -> dict[str, Any]:
    """Return the rows with command, hardware and date, in the form of benchmarks/results."""
    return {
        "command": f"python -m benchmarks.faults.reliability {experiment}",
        "what": DESCRIPTIONS[experiment],
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "date": about()["date"],
        **measured,
    }


def on_slurm(
    folder: Path,
    nodes: int,
    faults: Sequence[Fault],
    only: str,
    train: Callable[[SlurmCluster, Path], Losses],
    inject: Callable[[SlurmCluster, Fault, Path, Losses], dict[str, Any]],
) -> Rows:
    """Inject each fault into a job, and compare its losses with those of a reference job.

    Args:
        folder: folder of the cluster and of the jobs.
        nodes: number of nodes.
        faults: the faults.
        only: text in the names of the faults that are injected.
        train: runs the reference job in a run directory; returns its losses.
        inject: injects a fault into a job in a run directory; returns its row.
    """
    rows = []
    with SlurmCluster(folder / "slurm", nodes, 4, 2, folder / "local") as cluster:
        pack_environment(cluster.folder)
        reference = train(cluster, folder / "reference")
        for number, fault in enumerate(faults):
            if only in fault.name:
                print(f"{fault.name} ...", file=sys.stderr, flush=True)
                rows.append(inject(cluster, fault, folder / f"fault_{number}", reference))
                cluster.wait_idle(90)
    return rows


def reference_losses(cluster: SlurmCluster, run_dir: Path) -> Losses:
    """Return the losses of a job without faults, over the steps of the longest job."""
    job = submit(cluster, (NODES, *OPTIONS), (*OVERRIDES, "trainer.steps=1000000"), run_dir)
    job.wait(lambda: job.steps >= 1 or job.ended, PATIENCE_SECONDS, "in the middle")
    time.sleep(LONG_SECONDS)
    job.wait(lambda: job.steps >= STEPS or job.ended, PATIENCE_SECONDS, "far enough")
    (run_dir / "STOP").touch()
    job.wait(lambda: job.ended, PATIENCE_SECONDS, "ended")
    if job.exit_code != StopRequested.exit_code or job.steps < STEPS:
        raise LaunchError(f"the reference job failed:\n{job.output[-3000:]}")
    return job.losses


def inject(cluster: SlurmCluster, fault: Fault, run_dir: Path, reference: Losses) -> dict[str, Any]:
    """Inject one fault into one job, wait for its end, and restart it; return its row."""
    steps = max(reference) if fault.is_long else STEPS
    common = (*OVERRIDES, f"trainer.steps={steps}")
    job = submit(cluster, (NODES, *OPTIONS, *fault.options), (*common, *fault.overrides), run_dir)
    job.wait(lambda: job.steps >= ACT_AT_STEP or job.ended, PATIENCE_SECONDS, "in the middle")
    fault.act(job)
    seconds = job.wait(lambda: _off_the_nodes(job), PATIENCE_SECONDS, "off its nodes")
    end, reached = job.end if job.ended else "requeued", job.steps
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
    losses = restarted.losses
    if restarted.exit_code or max(losses) != steps:
        raise LaunchError(f"{fault.name}: the job did not resume:\n{restarted.output[-3000:]}")
    worst = max(abs(losses[step] - reference[step]) for step in range(1, steps + 1))
    return {
        "fault": fault.name,
        "nodes_free_after": format_seconds(seconds),
        "job": end,
        "first_new_step_after": format_seconds(seconds_to_step),
        "steps_done_twice": max(0, reached - _resumptions(restarted.output)[-1]),
        "culprit": named(fault, job.output),  # ranks may have written after the nodes were freed
        "largest_loss_difference": float(f"{worst:.2g}"),
    }


def replaced_reference(cluster: SlurmCluster, run_dir: Path) -> Losses:
    """Return the losses of a job with a node that waits, without faults."""
    replace(cluster, Fault("", lambda job: None), run_dir, {})
    return losses_of(run_dir)


def replace(
    cluster: SlurmCluster, fault: Fault, run_dir: Path, reference: Losses
) -> dict[str, Any]:
    """Inject one fault into a job that goes on; return its row, in which None is unknown.

    `seconds_to_step` lasts from the fault to the end of the next step.
    """
    variables = {"FRONTIER_LLM_REQUEUES": str(fault.requeues)}
    variables["FRONTIER_LLM_SPARE_NODES" if fault.replaces else "FRONTIER_LLM_RESTARTS"] = "1"
    nodes = ["--nodes=3", "--no-kill"] if fault.replaces else [NODES]
    job = submit(cluster, (*OPTIONS, *nodes), REPLACED_KEYS, run_dir, variables)
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
    if max(losses, default=0) < REPLACED_STEPS:
        print(job.output[-4000:], file=sys.stderr)
    worst = max((abs(losses.get(s, 9.0) - loss) for s, loss in reference.items()), default=0.0)
    return {
        "fault": fault.name,
        "seconds_to_step": round(seconds, 1) if losses else None,
        "steps_done_twice": count_steps(run_dir) - max(losses, default=0) if losses else 0,
        "job": f"requeued {restarts} time, then {job.end}" if restarts else job.end,
        "largest_loss_difference": worst if losses else None,
    }


def named(fault: Fault, output: str) -> str | None:
    """Return the text in which a job names the cause of its end; None: there is no cause."""
    if not fault.culprit:
        return None
    found = re.search(fault.culprit, output)
    return found[0] if found else "not named"


def elastic(folder: Path) -> Rows:
    """Train on 4, then 2, then 3 ranks of this machine; compare with a run on 4 ranks."""
    reference, run_dir = folder / "reference", folder / "elastic"
    _train(reference, 4, STEPS)
    expected = _ledger(reference)
    rows: Rows = []
    first = 1
    for ranks, until in ((4, 25), (2, 60), (3, STEPS)):
        micro_batch = _train(run_dir, ranks, until)
        found = {step: row for step, row in _ledger(run_dir).items() if step >= first}
        alike = all(digest == expected[step][0] for step, (digest, _) in found.items())
        worst = max(abs(loss - expected[step][1]) for step, (_, loss) in found.items())
        rows.append({
            "ranks": ranks,
            "micro_batch": micro_batch,
            "steps": f"{first} to {max(found)}",
            "samples_as_undisturbed": alike,
            "largest_loss_difference": float(f"{worst:.2g}"),
        })  # fmt: skip
        first = max(found) + 1
    return rows


def _train(run_dir: Path, ranks: int, until: int) -> int:
    """Train or resume in a run directory until a step; return the micro-batch size."""
    keys = (f"trainer.steps={STEPS}", "parallel.pipeline=1", "launch.elastic=true",
            f"launch.ranks={ranks}")  # fmt: skip
    run = DisturbedRun(run_dir, (*OVERRIDES, *keys))
    try:
        is_part = until < STEPS and run.wait_beyond(until - 1)
        code = run.stop() if is_part else run.wait_for_end()
    finally:
        run.kill_all()
    if code not in (0, StopRequested.exit_code):
        raise LaunchError(f"the run on {ranks} ranks failed:\n{run.log.read_text()[-3000:]}")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    return int(config["data"]["micro_batch"])


def _ledger(run_dir: Path) -> dict[int, tuple[str, float]]:
    """Return digest and loss of every step; of a repeated step, the later ones."""
    (losses, _), (samples, _) = read_steps(run_dir, "loss"), read_samples(run_dir)
    return {step: (digest, *losses[step]) for step, (_, _, digest) in samples.items()}


def _off_the_nodes(job: Job) -> bool:
    """Return whether Slurm has freed the nodes: the job has ended, or waits for its restart."""
    fields = job.fields
    return job.ended or int(fields.get("Restarts", "0")) > 0 or fields["JobState"] == "PENDING"


def _restart(
    cluster: SlurmCluster, job: Job, fault: Fault, overrides: Sequence[str]
) -> tuple[float, Job]:
    """Restart the job as soon as its nodes are idle; return when it could start, and the job."""
    cluster.wait_idle(90)
    if job.ended:
        return time.monotonic(), submit(cluster, (NODES, *OPTIONS), overrides, job.run_dir)
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


if __name__ == "__main__":
    sys.exit(run_command(main))
