"""What happens to jobs when something happens: faults on a real Slurm, and the cost of starting.

    python tools/reliability.py faults [--only WORD]   jobs on 2 nodes x 2 ranks, one fault each
    python tools/reliability.py elastic                 one run on 4, then 2, then 3 local ranks
    python tools/reliability.py starts                  start-up seconds, operations at 3,072 ranks

Each prints a Markdown table and writes it, with all figures, into --folder. The first needs root
and Slurm's programs (tools/slurm_lab/cluster.py names the packages).
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.errors import LaunchError, StopRequested
from frontier_llm.units import format_seconds
from tools.marked_page import filled
from tools.options import ending
from tools.slurm_lab.cluster import SlurmCluster
from tools.slurm_lab.faults import FAULTS, Fault
from tools.slurm_lab.jobs import ROOT, Job, losses_of, pack_environment, submit

SCRIPT = "scripts/a100.sbatch"
STEPS = 100
"""Of a job."""
LONG_SECONDS = 120.0
"""Of the steps of a job that meets its time limit, which Slurm counts in minutes."""
ACT_AT_STEP = 25
"""Late enough for two checkpoints."""
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


@dataclass(frozen=True)
class Outcome:
    """What was seen of one fault."""

    fault: str
    seconds_to_end: float
    """From the fault until Slurm had taken the nodes back."""
    end: str
    """State and exit code, or that it was requeued."""
    seconds_to_step: float
    """From the new start (no queue before it) to the first new step."""
    resumed_at: int
    """The first step after the new start."""
    lost_steps: int
    """Steps that were done twice."""
    culprit: str
    """What the job said of the cause."""
    named_rightly: bool
    largest_loss_difference: float
    """From the undisturbed run, over all steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the proofs; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("faults", "elastic", "starts"), help="to prove, see above")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/reliability"), help="of the runs (%(default)s)"
    )
    parser.add_argument("--only", default="", help="faults whose name holds this word")
    parser.add_argument("--page", type=Path, help="a page whose table of that name is replaced")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.absolute()
    if chosen.what == "starts":
        from tools.slurm_lab.starts import starts

        text = starts(folder)
    elif chosen.what == "elastic":
        text = elastic(folder)
    else:
        wanted = [fault for fault in FAULTS if chosen.only in fault.name]
        text = on_cluster(folder, lambda cluster: faults(cluster, folder, wanted))
    (folder / f"{chosen.what}.md").write_text(text)
    if chosen.page is not None:
        page: Path = chosen.page
        page.write_text(filled(page.read_text(), {chosen.what: ["", text]}))
    print(text)
    return 0


def on_cluster(folder: Path, work: Callable[[SlurmCluster], str]) -> str:
    """Do `work` on a cluster of two nodes that ends with it."""
    local = folder / "local"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster must end with this process
    with SlurmCluster(folder / "slurm", 2, 4, 2, local) as cluster:
        pack_environment(cluster.folder)
        return work(cluster)


def faults(cluster: SlurmCluster, folder: Path, wanted: Sequence[Fault]) -> str:
    """Let each fault happen to a job, and compare its losses with an undisturbed one's.

    What an earlier call has seen in this folder is not done again.
    """
    file = folder / "faults.json"
    found = json.loads(file.read_text()) if file.exists() else []
    outcomes = {values["fault"]: Outcome(**values) for values in found}
    calm = undisturbed(cluster, folder / "undisturbed")
    for number, fault in enumerate(FAULTS):
        if fault not in wanted or fault.name in outcomes:
            continue
        print(f"{fault.name} ...", file=sys.stderr, flush=True)
        outcomes[fault.name] = suffer(cluster, fault, folder / f"fault_{number}", calm)
        cluster.wait_idle(60)
        file.write_text(json.dumps([asdict(outcome) for outcome in outcomes.values()], indent=1))
    return _table([outcomes[fault.name] for fault in FAULTS if fault.name in outcomes])


def undisturbed(cluster: SlurmCluster, run_dir: Path) -> dict[int, float]:
    """Return the losses of a run that nothing happens to, over as many steps as a long one's."""
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
        raise LaunchError(f"the undisturbed run failed:\n{job.said[-3000:]}")
    done.touch()
    return job.losses


def suffer(cluster: SlurmCluster, fault: Fault, run_dir: Path, calm: dict[int, float]) -> Outcome:
    """Let one fault happen to one job, see it through, and start it again to its end."""
    steps = max(calm) if fault.is_long else STEPS
    usual = (*OVERRIDES, f"trainer.steps={steps}")
    options, overrides = (*OPTIONS, *fault.options), (*usual, *fault.overrides)
    job = submit(cluster, SCRIPT, options, overrides, run_dir)
    job.wait(lambda: job.steps >= ACT_AT_STEP or job.ended, PATIENCE_SECONDS, "in the middle")
    fault.act(job)
    seconds = job.wait(lambda: _off_the_nodes(job), PATIENCE_SECONDS, "off its nodes")
    end, reached = _end(job), job.steps
    if reached == steps:
        raise LaunchError(f"{fault.name}: the job was done before it was stopped")
    before = len(_resumptions(job.said))
    if fault.mend is not None:
        fault.mend(job)
    start, again = _again(cluster, job, fault, usual)
    again.wait(lambda: _makes_steps(again, before) or again.ended, PATIENCE_SECONDS, "resumed")
    seconds_to_step = time.monotonic() - start
    again.wait(lambda: again.ended, PATIENCE_SECONDS, "ended again")
    if again.exit_code or again.steps != steps:
        raise LaunchError(f"{fault.name}: it did not go on:\n{again.said[-3000:]}")
    resumed_at = _resumptions(again.said)[-1]
    # read again: ranks that Slurm gave up may have spoken after it had taken the nodes back
    named = re.search(fault.culprit, job.said) if fault.culprit else None
    losses = again.losses
    return Outcome(
        fault=fault.name,
        seconds_to_end=seconds,
        end=end,
        seconds_to_step=seconds_to_step,
        resumed_at=resumed_at,
        lost_steps=max(0, reached - resumed_at),
        culprit=named[0] if named else "",
        named_rightly=named is not None or not fault.culprit,
        largest_loss_difference=max(abs(losses[step] - calm[step]) for step in range(1, steps + 1)),
    )


def elastic(folder: Path) -> str:
    """Train on 4, then 2, then 3 ranks of this machine; compare with 4 ranks from end to end."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="elastic_", dir=folder))
    calm, run_dir = runs / "undisturbed", runs / "elastic"
    _train(calm, 4, STEPS)
    expected = _ledger(calm)
    lines = [
        "| ranks | micro-batch | steps | samples as undisturbed | largest difference of the loss |",
        "|---|---|---|---|---|",
    ]
    first = 1
    for ranks, until in ((4, 25), (2, 60), (3, STEPS)):
        micro_batch = _train(run_dir, ranks, until)
        found = {step: row for step, row in _ledger(run_dir).items() if step >= first}
        alike = all(row["digest"] == expected[step]["digest"] for step, row in found.items())
        losses = [abs(row["loss"] - expected[step]["loss"]) for step, row in found.items()]
        lines.append(
            f"| {ranks} | {micro_batch} | {first} to {max(found)} | {'all' if alike else 'no'} | "
            f"{max(losses):.2g} |"
        )
        first = max(found) + 1
    return "\n".join([*lines, ""])


def _train(run_dir: Path, ranks: int, until: int) -> int:
    """Go on in a run directory with so many ranks until a step; return the micro-batch it had."""
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
    """Return digest and loss of every step; of one that was done twice, the later."""
    lines = (run_dir / "ledger.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = losses_of(run_dir)
    return {row["step"]: {**row, "loss": losses[row["step"]]} for row in rows if "digest" in row}


def _off_the_nodes(job: Job) -> bool:
    """Whether Slurm has taken the nodes back: the job ended, or waits to start again."""
    fields = job.fields
    return job.ended or int(fields.get("Restarts", "0")) > 0 or fields["JobState"] == "PENDING"


def _end(job: Job) -> str:
    if not job.ended:
        return "requeued"
    return f"{job.fields['JobState'].lower()}, exit code {job.exit_code}"


def _again(
    cluster: SlurmCluster, job: Job, fault: Fault, overrides: Sequence[str]
) -> tuple[float, Job]:
    """Have the job start again, as soon as its nodes are there; return since when it may."""
    cluster.wait_idle(90)
    if job.ended:
        return time.monotonic(), submit(cluster, SCRIPT, OPTIONS, overrides, job.run_dir)
    # Slurm lets a requeued job wait for two minutes. After the loss of a node that is needed: what
    # was to end on it is ended when it answers again, and would end the new start of the same job.
    if fault.mend is None:
        cluster.ask("scontrol", "update", f"jobid={job.number}", "StartTime=now")
    else:
        job.wait(lambda: job.fields["JobState"] == "RUNNING", PATIENCE_SECONDS, "running again")
    return time.monotonic(), job


def _makes_steps(job: Job, before: int) -> bool:
    found = _resumptions(job.said)
    return len(found) > before and job.steps > found[-1]


def _resumptions(said: str) -> list[int]:
    """Return the step after which each start of a job went on."""
    return [int(step) for step in re.findall(r"resumed +.*?step (\d+)", said)]


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| what happened | nodes free after | the job | first new step after | steps done twice | "
        "culprit named | largest difference of the loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for seen in outcomes:
        named = "nobody to name" if not seen.culprit else f"`{seen.culprit}`"
        lines.append(
            f"| {seen.fault} | {format_seconds(seen.seconds_to_end)} | {seen.end} | "
            f"{format_seconds(seen.seconds_to_step)} | {seen.lost_steps} | "
            f"{named if seen.named_rightly else '**not named**'} | "
            f"{seen.largest_loss_difference:.2g} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(ending(main))
