"""Kill ranks of a running job at random moments, and check that the run is the undisturbed one.

    python -m benchmarks.faults.rank_deaths                  # 200 deaths of ranks, 10 minutes
    python -m benchmarks.faults.rank_deaths --optimizer 2    # states only in checkpoints
    python -m benchmarks.faults.rank_deaths --copies         # states in copies in memory

A tiny GPT trains on 8 ranks (tensor 2 x pipeline 2 x data 2) with recovery.enabled=true, evaluates
every 15 steps and saves every 10. SIGKILL is sent to a random rank 0.2 to 0.8 s after the last
recovery. 15% of the kills are followed by a second one within 0.8 s, while the first is being
repaired.

Checked: loss, gradient norm, samples and validation loss of every step equal those of a run that
is not disturbed, bit by bit; each step has one line in metrics.jsonl and one in ledger.jsonl; the
run ends by itself when asked to; no process is left. Reported: seconds from the last kill until the
first step of the new generation is done, and threads, descriptors and memory of the ranks by the
number of deaths that they have survived. The exit code is 1 if a check fails. Works on Linux only.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.progress import track

from benchmarks.harness import (
    ROOT,
    bench_console,
    bench_parser,
    make_table,
    work_folder,
    write_json,
)
from benchmarks.testbed.forked_run import corpus_of
from frontier_llm.cli.options import at_least, run_command

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
PATIENCE_SECONDS = 120.0
"""A run that does no step for so long has failed."""
COPIES = Path("/dev/shm")
"""Parent of the folder for copies in memory."""
SECOND_KILLS = 0.15
"""Share of the kills that are followed by a second one."""
AGES = {
    "0": (0, 1),
    "1 to 2": (1, 3),
    "3 to 7": (3, 8),
    "8 to 19": (8, 20),
    "20 or more": (20, 10**9),
}
"""Groups of ranks by the number of deaths that they have survived: first, and beyond the last."""


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

    def usage(self) -> list[tuple[str, int, float, float, float]]:
        """Return (deaths survived, samples, median threads, descriptors, MiB) by groups."""
        rows = []
        for name, (low, high) in AGES.items():
            samples = [s for age, many in self.resources.items() if low <= age < high for s in many]
            if samples:
                threads, descriptors, memory = map(median, zip(*samples, strict=True))
                rows.append((name, len(samples), threads, descriptors, memory))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        return {
            "processes_killed": self.kills,
            "steps_compared": self.steps,
            "problems": self.problems,
            "seconds": self.seconds,
            "usage": self.usage(),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the names and the values of the figures."""
        seconds = sorted(self.seconds) or [0.0]
        return [
            ("processes killed", str(self.kills)),
            ("steps compared", str(self.steps)),
            ("problems", str(len(self.problems))),
            ("kill to next step, median", f"{median(seconds):.2f} s"),
            ("kill to next step, worst", f"{seconds[-1]:.2f} s"),
            *(
                (
                    f"deaths survived: {name}",
                    f"{threads:.0f} threads, {descriptors:.0f} descriptors, {memory:.0f} MiB "
                    f"(median of {count})",
                )
                for name, count, threads, descriptors, memory in self.usage()
            ),
        ]


class DisturbedRun:
    """A run of the command line in processes of its own, whose ranks are killed."""

    def __init__(self, run: Path, overrides: Sequence[str]) -> None:
        self.run, self.log = run, run.with_suffix(".log")
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"run.dir={run}"]
        self._launcher = subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def exit_code(self) -> int | None:
        """Return the exit code of the launcher; None while it runs."""
        return self._launcher.poll()

    def kill_all(self) -> None:
        """Kill the launcher, without which its ranks end."""
        self._launcher.kill()
        self._launcher.wait()

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
            if self.exit_code() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def holders(self) -> dict[int, tuple[int, int]]:
        """Return process id and first generation of each rank's process."""
        lines = (self.run / "ranks.jsonl").read_text().splitlines()
        return {e["rank"]: (e["pid"], e["generation"]) for e in map(json.loads, lines)}

    def kill(self, rank: int) -> set[int]:
        """Kill the process of a rank; return its id if it ran."""
        pid = self.holders()[rank][0]
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            return set()
        return {pid}

    def wait_until_replaced(self, pids: Collection[int]) -> None:
        """Wait until no rank is held by one of these processes, or the run is over."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(pid in pids for pid, _ in self.holders().values()):
            if self.exit_code() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.005)

    def stop(self) -> int | None:
        """Ask the run to stop; return its exit code, or None if it does not stop."""
        (self.run / "STOP").touch()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill ranks as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=200, help="number of kills (default 200)")
    add("--optimizer", type=int, default=1, choices=(1, 2), help="sharding.optimizer (default 1)")
    add(
        "--copies",
        action="store_true",
        help="sharding.optimizer=2, no other rank has the states, recovery.partner_copies=true",
    )
    add("--spares", type=int, default=0, help="recovery.spares (default 0)")
    add("--seed", type=int, default=1, help="seed of the moments and targets (default 1)")
    options = parser.parse_args(arguments)
    with work_folder("rank_deaths") as folder:
        overrides = [*OVERRIDES, *corpus_of(folder), f"sharding.optimizer={options.optimizer}",
                     f"recovery.spares={options.spares}"]  # fmt: skip
        if options.copies:
            overrides += [f"launch.ranks_per_node={RANKS_PER_NODE}", "sharding.optimizer=2",
                          "checkpoint.every_steps=100000"]  # fmt: skip
        outcome = disturb(folder, overrides, options)
        if (folder / "disturbed" / "metrics.jsonl").exists():
            compare(folder, overrides, outcome)
    console = bench_console()
    console.print(make_table("Deaths of ranks", ["figure", "value"], outcome.rows()))
    for problem in outcome.problems:
        console.print(problem, markup=False)
    write_json(options, outcome.to_dict())
    return 1 if outcome.problems else 0


def disturb(folder: Path, overrides: Sequence[str], options: Any) -> Outcome:
    """Run the job and kill its ranks; return what was measured."""
    outcome, draw = Outcome(), random.Random(options.seed)
    keys, copies = [*overrides, "recovery.enabled=true"], COPIES / folder.name
    if options.copies:
        keys += ["recovery.partner_copies=true", f"recovery.copies_path={copies}"]
    run = DisturbedRun(folder / "disturbed", keys)
    try:
        if not run.wait_beyond(3):
            outcome.problems.append(f"the run did not start:\n{run.log.read_text()}")
            return outcome
        for _ in track(range(options.kills), "kills"):
            if not kill_and_wait(run, draw, outcome):
                return outcome
        code = run.stop()
        if code != 3:
            outcome.problems.append(f"exit code {code} instead of 3 after the request to stop")
    finally:
        run.kill_all()
        if copies.exists():
            outcome.problems += [f"{path} is left" for path in copies.iterdir()]
            shutil.rmtree(copies)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run.run) in str(p.info["cmdline"])]
    outcome.problems += [f"process {process.pid} is left" for process in left]
    return outcome


def kill_and_wait(run: DisturbedRun, draw: random.Random, outcome: Outcome) -> bool:
    """Kill a rank after a random time, and wait for the next step; return whether it was done."""
    time.sleep(draw.uniform(0.2, 0.8))
    sample_resources(run, outcome)
    killed, start = run.kill(draw.randrange(RANKS)), time.monotonic()
    if draw.random() < SECOND_KILLS:
        time.sleep(draw.uniform(0.0, 0.8))
        if second := run.kill(draw.randrange(RANKS)):
            killed, start = killed | second, time.monotonic()
    outcome.kills += len(killed)
    run.wait_until_replaced(killed)
    step = run.steps
    if run.wait_beyond(step):
        outcome.seconds.append(time.monotonic() - start)
        return True
    log = run.log.read_text()[-5000:]
    outcome.problems.append(f"{run.run.name}: no step after the kill of step {step}:\n{log}")
    return False


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
    """Train undisturbed as far as the disturbed run came, and compare every step of it."""
    found, double = steps_of(folder / "disturbed")
    reference = DisturbedRun(folder / "reference", overrides)
    while reference.exit_code() is None and reference.steps < len(found):
        time.sleep(0.2)
    reference.stop()
    problems = [f"step {step} has two lines in metrics.jsonl" for step in double]
    if sorted(found) != list(range(1, len(found) + 1)):
        problems.append("steps are missing in metrics.jsonl")
    expected, _ = steps_of(reference.run)
    for step, values in found.items():
        if values[:3] != expected[step][:3] or values[3] not in (expected[step][3], None):
            problems.append(f"step {step}: {values} instead of {expected[step]}")
    samples, double = samples_of(folder / "disturbed")
    problems += [f"step {step} has two lines in ledger.jsonl" for step in double]
    expected_samples, _ = samples_of(reference.run)
    for step in found:
        if samples.get(step) != expected_samples[step]:
            problems.append(f"step {step}: samples {samples.get(step)}")
    outcome.steps += len(found)
    outcome.problems += problems


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


if __name__ == "__main__":
    sys.exit(run_command(main))
