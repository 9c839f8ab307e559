"""Kill ranks of a running job at random moments, and check that the run is the undisturbed one.

    python -m benchmarks.faults.rank_deaths                  # 200 deaths of ranks, 10 minutes
    python -m benchmarks.faults.rank_deaths --kills 50 --node --json nodes.json
    python -m benchmarks.faults.rank_deaths --optimizer 2    # states only in checkpoints
    python -m benchmarks.faults.rank_deaths --copies         # states in copies in memory

A tiny GPT trains on 8 ranks (tensor 2 x pipeline 2 x data 2; with --node tensor 2 x data 4 and
sharding.optimizer=2) with recovery.enabled=true, evaluates every 15 steps and saves every 10.
SIGKILL is sent to a random rank, or with --node to the four ranks of a node, 0.2 to 0.8 s after the
last recovery. 15% of the kills are followed by a second one within 0.8 s, while the first is being
repaired.

Checked: loss, gradient norm, samples and validation loss of every step equal those of a run that
is not disturbed, bit by bit; each step has one line in metrics.jsonl and one in ledger.jsonl; the
run ends by itself when asked to; no process is left. Reported: seconds from the last kill until the
next step is done, and threads, descriptors and memory of the ranks by the number of deaths that
they have survived. The exit code is 1 if a check fails. Works on Linux only.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.progress import Progress, track
from rich.table import Table

from benchmarks.faults.kill_loop import write_corpus
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, bench_parser, run_command

ROOT = Path(__file__).resolve().parents[2]
RANKS, RANKS_PER_NODE = 8, 4
OVERRIDES = (
    "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocabulary=300", "data=text",
    "data.vocabulary=300", "data.sequence_length=32", "data.global_batch=8", "data.micro_batch=1",
    f"launch.ranks={RANKS}", "parallel.tensor=2", "parallel.pipeline=2", "precision=fp32",
    "sharding.params=1", "sharding.grads=1", "checkpoint=lazy", "checkpoint.every_steps=10",
    "trainer.evaluate_every_steps=15", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    "trainer.steps=5000", "optimizer.decay_steps=5000", "telemetry.wandb=off",
    "telemetry.progress=false", "run.resume=never", "plan=off",
)  # fmt: skip
SECOND_KILLS = 0.15
"""Share of the kills that are followed by a second one."""
COPIES = Path("/dev/shm")
"""Parent of the folder for copies in memory."""
PATIENCE_SECONDS = 120.0
"""A run that does no step for so long has failed."""


@dataclass
class Outcome:
    """What a series of kills has shown."""

    seconds: list[float] = field(default_factory=list)
    """From the last kill to the end of the next step."""
    kills: int = 0
    """Number of processes killed."""
    problems: list[str] = field(default_factory=list)
    """What was lost or wrong."""
    resources: dict[int, list[tuple[int, int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Threads, descriptors and MiB of a rank, by the number of deaths that it has survived."""
    steps: int = 0
    """Number of steps compared."""


class DisturbedRun:
    """A run of the command line in a process of its own, whose ranks can be killed."""

    def __init__(self, run: Path, overrides: Sequence[str]) -> None:
        self.run = run
        self.log = run.with_suffix(".log")
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"run.dir={run}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment
        )

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        try:
            return len((self.run / "metrics.jsonl").read_bytes().splitlines())
        except OSError:
            return 0

    def wait_beyond(self, step: int) -> bool:
        """Wait until a later step is done; return whether it was."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.steps <= step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def holders(self) -> dict[int, tuple[int, int]]:
        """Return process id and first generation of each rank's process."""
        found = {}
        for line in (self.run / "ranks.jsonl").read_text().splitlines():
            entry = json.loads(line)
            found[entry["rank"]] = entry["pid"], entry["generation"]
        return found

    def kill(self, ranks: Sequence[int]) -> int:
        """Kill the processes of some ranks; return how many ran."""
        holders, killed = self.holders(), 0
        for rank in ranks:
            try:
                os.kill(holders[rank][0], 9)
                killed += 1
            except ProcessLookupError:
                continue
        return killed

    def stop(self) -> int:
        """Ask the run to stop; return its exit code."""
        (self.run / "STOP").touch()
        return self.process.wait(PATIENCE_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill ranks as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=200, help="number of kills (default 200)")
    add("--node", action="store_true", help="kill the ranks of a node instead of one rank")
    add("--optimizer", type=int, default=1, choices=(1, 2), help="sharding.optimizer (default 1)")
    add(
        "--copies",
        action="store_true",
        help="sharding.optimizer=2, no other rank has the states, recovery.partner_copies=true",
    )
    add("--spares", type=int, default=0, help="recovery.spares (default 0)")
    add("--seed", type=int, default=1, help="seed of the moments and targets (default 1)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rank_deaths_") as name:
        folder = Path(name)
        overrides: tuple[str, ...] = (
            *OVERRIDES,
            f"data.path={write_corpus(folder)}",
            f"data.directory={folder}/corpora",
            f"sharding.optimizer={options.optimizer}",
            f"recovery.spares={options.spares}",
        )
        if options.copies:
            overrides += (
                f"launch.ranks_per_node={RANKS_PER_NODE}",
                "sharding.optimizer=2",
                "checkpoint.every_steps=100000",
            )
        if options.node:
            # each node has all optimizer states, divided over its ranks
            overrides += (
                f"launch.ranks_per_node={RANKS_PER_NODE}",
                "parallel.pipeline=1",
                "sharding.optimizer=2",
            )
        outcome = disturb(folder, overrides, options)
        compare(folder, overrides, outcome)
    console = wide_console()
    console.print(to_table(outcome))
    for problem in outcome.problems:
        console.print(problem, highlight=False, markup=False)
    if options.json:
        options.json.write_text(json.dumps(to_dict(outcome, options), indent=1))
    return 1 if outcome.problems else 0


def disturb(folder: Path, overrides: Sequence[str], options: Any) -> Outcome:
    """Run the job and kill its ranks; return what was measured."""
    outcome, draw = Outcome(), random.Random(options.seed)
    keys = [*overrides, "recovery.enabled=true"]
    if options.copies:
        keys += ["recovery.partner_copies=true", f"recovery.copies_path={COPIES}/{folder.name}"]
    run = DisturbedRun(folder / "disturbed", keys)
    try:
        if not run.wait_beyond(3):
            outcome.problems.append(f"the run did not start:\n{run.log.read_text()}")
            return outcome
        for _ in track(range(options.kills), "kills"):
            time.sleep(draw.uniform(0.2, 0.8))
            sample_resources(run, outcome)
            step = run.steps
            outcome.kills += run.kill(victims(draw, node=options.node))
            start = time.monotonic()
            if draw.random() < SECOND_KILLS:
                time.sleep(draw.uniform(0.0, 0.8))
                if killed := run.kill([draw.randrange(RANKS)]):
                    outcome.kills += killed
                    start, step = time.monotonic(), run.steps
            if not run.wait_beyond(step):
                outcome.problems.append(f"no step after the kill of step {step}")
                print(run.log.read_text()[-5000:], file=sys.stderr)
                return outcome
            outcome.seconds.append(time.monotonic() - start)
        code = run.stop()
        if code != 3:
            outcome.problems.append(f"exit code {code} instead of 3 after the request to stop")
    finally:
        run.process.kill()
        run.process.wait()
        if (COPIES / folder.name).exists():
            outcome.problems += [f"{p} is left" for p in (COPIES / folder.name).iterdir()]
            shutil.rmtree(COPIES / folder.name)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run.run) in str(p.info["cmdline"])]
    outcome.problems += [f"process {process.pid} is left" for process in left]
    return outcome


def victims(draw: random.Random, *, node: bool) -> Sequence[int]:
    """Return the ranks of the next kill."""
    if not node:
        return [draw.randrange(RANKS)]
    first = draw.randrange(RANKS // RANKS_PER_NODE) * RANKS_PER_NODE
    return range(first, first + RANKS_PER_NODE)


def sample_resources(run: DisturbedRun, outcome: Outcome) -> None:
    """Record what every rank uses."""
    holders = run.holders()
    newest = max(generation for _, generation in holders.values())
    for pid, generation in holders.values():
        try:
            process = psutil.Process(pid)
            used = process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20
        except psutil.Error:
            continue
        outcome.resources[newest - generation].append(used)


def compare(folder: Path, overrides: Sequence[str], outcome: Outcome) -> None:
    """Train undisturbed as far as the disturbed run came, and compare every step."""
    disturbed = folder / "disturbed"
    found, double = steps_of(disturbed)
    outcome.steps = len(found)
    outcome.problems += [f"step {step} has two lines in metrics.jsonl" for step in double]
    if sorted(found) != list(range(1, len(found) + 1)):
        outcome.problems.append("steps are missing in metrics.jsonl")
    reference = DisturbedRun(folder / "reference", overrides)
    with Progress() as progress:
        bar = progress.add_task("reference", total=len(found))
        while reference.process.poll() is None and reference.steps < len(found):
            progress.update(bar, completed=reference.steps)
            time.sleep(0.2)
    reference.stop()
    expected, _ = steps_of(folder / "reference")
    for step, values in found.items():
        if values[:3] != expected[step][:3] or values[3] not in (expected[step][3], None):
            outcome.problems.append(f"step {step}: {values} instead of {expected[step]}")
    samples, double = samples_of(disturbed)
    outcome.problems += [f"step {step} has two lines in ledger.jsonl" for step in double]
    expected_samples, _ = samples_of(folder / "reference")
    for step in found:
        if samples.get(step) != expected_samples[step]:
            outcome.problems.append(f"step {step}: samples {samples.get(step)}")


def steps_of(run: Path) -> tuple[dict[int, tuple[float, float, int, float | None]], list[int]]:
    """Return loss, norm, samples and validation loss by step, and the steps with two lines."""
    found, double = {}, []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        double += [row["step"]] if row["step"] in found else []
        values = row["loss"], row["grad_norm"], row["samples"], row.get("validation_loss")
        found[row["step"]] = values
    return found, double


def samples_of(run: Path) -> tuple[dict[int, tuple[int, int, str]], list[int]]:
    """Return first sample, samples and digest by step, and the steps with two lines."""
    found: dict[int, tuple[int, int, str]] = {}
    double = []
    for line in (run / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry.get("event") == "resume":  # these steps are done again
            found = {step: read for step, read in found.items() if step <= entry["step"]}
        if "digest" in entry:
            double += [entry["step"]] if entry["step"] in found else []
            found[entry["step"]] = entry["first_sample"], entry["samples"], entry["digest"]
    return found, double


def usage(outcome: Outcome) -> list[tuple[str, int, float, float, float]]:
    """Return (deaths survived, samples, median threads, descriptors, MiB) by groups of deaths."""
    rows = []
    for low, high in ((0, 1), (1, 3), (3, 8), (8, 20), (20, 10**9)):
        samples = [s for deaths, many in outcome.resources.items() if low <= deaths < high
                   for s in many]  # fmt: skip
        if samples:
            name = f"{low}" if high == low + 1 else f"{low} or more" if high > 99 else (
                f"{low} to {high - 1}")  # fmt: skip
            middle = [median(column) for column in zip(*samples, strict=True)]
            rows.append((name, len(samples), middle[0], middle[1], middle[2]))
    return rows


def to_table(outcome: Outcome) -> Table:
    """Return the figures as a table."""
    table = Table("figure", "value", title="Deaths of ranks")
    seconds = sorted(outcome.seconds) or [0.0]
    table.add_row("processes killed", str(outcome.kills))
    table.add_row("steps compared", str(outcome.steps))
    table.add_row("problems", str(len(outcome.problems)))
    table.add_row("kill to next step, median", f"{median(seconds):.2f} s")
    table.add_row("kill to next step, worst", f"{seconds[-1]:.2f} s")
    for name, count, threads, descriptors, memory in usage(outcome):
        text = f"{threads:.0f} threads, {descriptors:.0f} descriptors, {memory:.0f} MiB"
        table.add_row(f"deaths survived: {name}", f"{text} (median of {count})")
    return table


def to_dict(outcome: Outcome, options: Any) -> dict[str, Any]:
    """Return the figures as plain JSON."""
    return {
        "options": {
            "kills": options.kills, "node": options.node, "optimizer": options.optimizer,
            "copies": options.copies, "spares": options.spares, "seed": options.seed,
        },
        "cores": os.cpu_count(),
        "processes_killed": outcome.kills,
        "steps_compared": outcome.steps,
        "problems": outcome.problems,
        "seconds": outcome.seconds,
        "usage": usage(outcome),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(main))
