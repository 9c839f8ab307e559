"""Kill ranks or nodes of a running job, and check that the run is the undisturbed one.

    python -m benchmarks.faults.rank_deaths                  # 200 deaths of ranks, 10 minutes
    python -m benchmarks.faults.rank_deaths --optimizer 2    # states only in checkpoints
    python -m benchmarks.faults.rank_deaths --copies         # states in copies in memory
    python -m benchmarks.faults.rank_deaths --nodes ranks --kills 50    # the ranks of a node
    python -m benchmarks.faults.rank_deaths --nodes all --kills 50      # all processes of a node

A tiny GPT trains on 8 ranks (tensor 2 x pipeline 2 x data 2) with recovery.enabled=true, evaluates
every 15 steps and saves every 10. SIGKILL is sent to a random rank 0.2 to 0.8 s after the last
recovery. 15% of the kills are followed by that of a random rank within 0.8 s, while the first is
being repaired.

With --nodes the GPT trains with tensor 2 x data 4 and sharding.optimizer=2 on two nodes. Each node
is a network namespace with an address of its own, and has four tasks, which get the variables of
srun. `ranks` kills all four ranks of a random node at once, and the tasks of the node start others.
`all` also kills these tasks, and tasks of a node that waits take over. The node of task 0 is spared
then, because the job ends with it. When no node waits any more, the run is asked to stop, and the
next run begins.

Checked: loss, gradient norm, samples and validation loss of every step equal those of a run that
is not disturbed, bit by bit; each step has one line in metrics.jsonl and one in ledger.jsonl; the
run ends by itself when asked to; no process is left. Reported: seconds from the last kill until the
first step of the new generation is done, and threads, descriptors and memory of the ranks by the
number of deaths that they have survived. The exit code is 1 if a check fails. Works on Linux only;
--nodes needs root and iproute2.
"""

import random
import shutil
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.faults.disturbed_runs import OVERRIDES, RANKS, RANKS_PER_NODE, DisturbedRun
from benchmarks.faults.run_files import read_samples, read_steps
from benchmarks.harness import (
    add_numbers,
    bench_parser,
    print_table,
    progress,
    work_folder,
    write_json,
)
from benchmarks.testbed.forked_run import corpus_of, import_training
from benchmarks.testbed.namespaces import namespaces
from frontier_llm.cli.options import run_command

SPARE_NODES = 5
"""Nodes that wait at the start of a run of which whole nodes are killed."""
RATE = "40gbit"
"""Rate of a link: far above what this machine can send."""
FIRST_KILL = 10
"""Number of steps before the first kill: there is a checkpoint then, in case that two kills at once
destroy all copies of a state."""
COPIES = Path("/dev/shm")
"""Parent of the folder for copies in memory."""
SECOND_KILLS = 0.15
"""Share of the kills that are followed by a second one."""
AGES = (0, 1, 3, 8, 20)
"""Smallest number of survived deaths of each group of ranks whose resources are compared."""
VALUES = ("loss", "grad_norm", "samples", "validation_loss")
"""What is compared of each step."""


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
        for low, high in zip(AGES, (*AGES[1:], 10**9), strict=True):
            samples = [s for age, many in self.resources.items() if low <= age < high for s in many]
            if samples:
                threads, descriptors, memory = map(median, zip(*samples, strict=True))
                rows.append((f"{low} or more", len(samples), threads, descriptors, memory))
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

    def show(self) -> None:
        """Print the figures and the problems."""
        seconds = self.seconds or [0.0]
        usage = [
            (f"deaths survived: {name}", f"{threads:.0f} threads, {descriptors:.0f} descriptors, "
             f"{memory:.0f} MiB (median of {count})")
            for name, count, threads, descriptors, memory in self.usage()
        ]  # fmt: skip
        rows = [
            ("processes killed", str(self.kills)),
            ("steps compared", str(self.steps)),
            ("problems", str(len(self.problems))),
            ("kill to next step, median", f"{median(seconds):.2f} s"),
            ("kill to next step, worst", f"{max(seconds):.2f} s"),
            *usage,
        ]
        print_table("Deaths of ranks", ["figure", "value"], rows)
        for problem in self.problems:
            print(problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill ranks as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--nodes", choices=("ranks", "all"), help="kill the ranks or all processes of a node")
    add("--optimizer", type=int, default=1, choices=(1, 2), help="sharding.optimizer (default 1)")
    add("--copies", action="store_true",
        help="sharding.optimizer=2, no other rank has the states, recovery.partner_copies=true",
    )  # fmt: skip
    numbers = [
        ("kills", 1, 200, "number of kills"),
        ("spares", 0, 0, "recovery.spares"),
        ("seed", 0, 1, "seed of the moments and targets"),
    ]
    add_numbers(parser, numbers)
    options = parser.parse_args(arguments)
    import_training()
    with work_folder("rank_deaths") as folder:
        overrides = [*OVERRIDES, *corpus_of(folder), f"sharding.optimizer={options.optimizer}"]
        if options.copies or options.nodes:
            overrides += [f"launch.ranks_per_node={RANKS_PER_NODE}", "sharding.optimizer=2"]
        if options.copies:
            overrides += ["checkpoint.every_steps=100000"]
        if options.nodes:
            overrides += ["parallel.pipeline=1"]
        outcome, runs = disturb(folder, overrides, options)
        if runs:
            compare(folder, overrides, runs, outcome)
    outcome.show()
    write_json(options, outcome.to_dict())
    return 1 if outcome.problems else 0


def disturb(
    folder: Path, overrides: Sequence[str], options: Namespace
) -> tuple[Outcome, list[Path]]:
    """Run jobs and kill their ranks; return what was measured, and the run directories."""
    outcome, draw, copies = Outcome(), random.Random(options.seed), COPIES / folder.name
    spare_nodes, left = SPARE_NODES if options.nodes == "all" else 0, options.kills
    spares = spare_nodes * RANKS_PER_NODE or options.spares
    keys = [*overrides, "recovery.enabled=true", f"recovery.spares={spares}"]
    if options.copies:
        keys += ["recovery.partner_copies=true", f"recovery.copies_path={copies}"]
    runs: list[Path] = []
    count = RANKS // RANKS_PER_NODE + spare_nodes
    with (
        progress("kills", options.kills) as advance,
        namespaces(count, RATE) if options.nodes else nullcontext(()) as nodes,
    ):
        while left and not outcome.problems:
            path = folder / f"disturbed_{len(runs)}"
            run = DisturbedRun(path, keys, nodes)
            kills = min(left, spare_nodes or left)
            left -= kills
            try:
                if not run.wait_beyond(FIRST_KILL):
                    outcome.problems.append(f"the run did not start:\n{run.log.read_text()}")
                    break
                runs.append(path)
                for _ in range(kills):
                    if not kill_and_wait(run, options.nodes, draw, outcome):
                        break
                    advance()
                if (code := run.stop()) != 3:
                    outcome.problems.append(f"exit code {code} instead of 3 after STOP")
                outcome.problems += [f"process {pid} is left" for pid in run.left_after(30)]
            finally:
                run.kill_all()
    if copies.exists():
        outcome.problems += [f"{path} is left" for path in copies.iterdir()]
        shutil.rmtree(copies)
    return outcome, runs


def kill_and_wait(
    run: DisturbedRun, nodes: str | None, draw: random.Random, outcome: Outcome
) -> bool:
    """Kill after a random time, and wait for the next step; return whether it was done.

    `nodes` is the value of the option.
    """
    time.sleep(draw.uniform(0.2, 0.8))
    sample_resources(run, outcome)
    if nodes == "all":
        killed = run.kill_node()
    elif nodes:
        first = draw.randrange(RANKS // RANKS_PER_NODE) * RANKS_PER_NODE
        killed = run.kill(range(first, first + RANKS_PER_NODE))
    else:
        killed = run.kill([draw.randrange(RANKS)])
    start = time.monotonic()
    if draw.random() < SECOND_KILLS:
        time.sleep(draw.uniform(0.0, 0.8))
        if second := run.kill([draw.randrange(RANKS)]):
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


def compare(folder: Path, overrides: Sequence[str], runs: Sequence[Path], outcome: Outcome) -> None:
    """Train undisturbed as far as the disturbed runs came, and compare every step of them."""
    last = max(len(read_steps(run)[0]) for run in runs)
    reference = DisturbedRun(folder / "reference", overrides)
    while reference.exit_code() is None and reference.steps < last:
        time.sleep(0.2)
    reference.stop()
    expected, _ = read_steps(reference.run, *VALUES)
    expected_samples, _ = read_samples(reference.run)
    for run in runs:
        found, double = read_steps(run, *VALUES)
        problems = [f"step {step} has two lines in metrics.jsonl" for step in double]
        if sorted(found) != list(range(1, len(found) + 1)):
            problems.append("steps are missing in metrics.jsonl")
        samples, double = read_samples(run)
        problems += [f"step {step} has two lines in ledger.jsonl" for step in double]
        for step, values in found.items():
            if values[:3] != expected[step][:3] or values[3] not in (expected[step][3], None):
                problems.append(f"step {step}: {values} instead of {expected[step]}")
            if samples.get(step) != expected_samples[step]:
                problems.append(f"step {step}: samples {samples.get(step)}")
        outcome.steps += len(found)
        outcome.problems += [f"{run.name}: {problem}" for problem in problems]


if __name__ == "__main__":
    sys.exit(run_command(main))
