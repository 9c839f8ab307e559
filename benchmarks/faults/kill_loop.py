"""Kill training runs at random moments, resume them, and check that nothing is lost or wrong.

    python -m benchmarks.faults.kill_loop                   # 100 kills, about 10 minutes
    python -m benchmarks.faults.kill_loop --kills 20 --seed 3 \
        --json benchmarks/results/kills_<cpu>_<date>.json
    python -m benchmarks.faults.kill_loop --nodes           # 100 losses of nodes, 10 minutes

A tiny GPT trains on two ranks with a checkpoint after every step. SIGKILL is sent to all ranks, to
one of them, or to their parent. A quarter of the kills come during start-up, the others within the
next few steps. The same command then resumes the run (run.resume=auto). When the run is complete,
the next run begins. A run that is killed before its first checkpoint cannot be resumed, and a new
run begins instead.

Two rules are checked. The loss and the gradient norm of every step must equal those of a reference
run that is not killed, bit by bit. A resumed run must start from the newest checkpoint that existed
before the kill, or from a later one. The exit code is 1 if a checkpoint was lost, a value was wrong
or a process did not end. Works on Linux only.

With --nodes the GPT trains on two nodes of two ranks. Every step is saved to the nodes' disks and
copied to the disk of the other node, and every 5th step is copied to the run directory. At a random
moment all ranks of one node are killed, and everything on its disk is deleted. A resumed run must
start from the newest step that was committed in the run directory, or both on the surviving node's
disk and in the copy of the lost node: neither from an earlier nor from a later one.
"""

import random
import shutil
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.faults.run_files import (
    PHASES,
    Phase,
    RunSnapshot,
    Values,
    committed_steps,
    read_steps,
    take_snapshot,
)
from benchmarks.harness import (
    add_numbers,
    bench_parser,
    print_table,
    progress,
    work_folder,
    write_json,
)
from benchmarks.testbed.forked_run import (
    OVERRIDES,
    POLL_SECONDS,
    ForkedRun,
    Target,
    corpus_of,
    import_training,
    train,
)
from frontier_llm.checkpoint.folders import COPY, FOLDER, NODE
from frontier_llm.cli.options import run_command

SHARE_WHILE_STARTING = 0.25
"""Share of the kills that come during start-up."""
LIMIT_SECONDS = 60.0
"""Time limit for all processes of a run to end after a kill, and for its first step to start."""
LOOK_SECONDS = 0.02
"""Interval at which the run directory is read."""
REJECTED = 2
"""Exit code of a run that rejects its configuration or its directory."""
LEVELS = (
    "launch.ranks=4", "launch.ranks_per_node=2", "checkpoint.every_steps=5",
    "checkpoint.tiers.local.every_steps=1", "checkpoint.tiers.local.keep=2",
    "checkpoint.partner=true",
)  # fmt: skip
"""Settings of runs that lose nodes."""


@dataclass(frozen=True)
class Kill:
    """One kill, and the state of the run right before it."""

    target: Target
    phase: Phase
    committed: int | None
    """Step of the newest checkpoint; None if there was none."""
    seconds_to_end: float | None
    """Time until all processes of the run had ended; None if they did not end by themselves."""


@dataclass
class KillSummary:
    """All kills, and all errors that were found."""

    kills: list[Kill] = field(default_factory=list)
    resumes: int = 0
    """Number of times a run was resumed from a checkpoint."""
    only_on_nodes: int = 0
    """Number of kills after which the newest checkpoint was not in the run directory."""
    new_starts: int = 0
    """Number of new runs. A run is new if the run before was complete or had no checkpoint."""
    completed: int = 0
    """Number of runs that reached their last step."""
    compared: set[tuple[str, int]] = field(default_factory=set)
    """Pairs of run and step whose losses were compared with the reference run."""
    lost: list[str] = field(default_factory=list)
    """Messages about committed checkpoints from which the run was not resumed."""
    wrong: list[str] = field(default_factory=list)
    """Messages about losses or gradient norms that differ from the reference run in any bit."""
    failed: list[str] = field(default_factory=list)
    """Messages about runs that failed, or did not end."""

    @property
    def errors(self) -> list[str]:
        """All messages."""
        return [*self.lost, *self.wrong, *self.failed]

    def compare(self, run_dir: Path, expected: Values) -> Values:
        """Compare the steps of a run with those of the reference run; return the former."""
        found, double = read_steps(run_dir, "loss", "grad_norm")
        run = run_dir.name
        self.compared |= {(run, step) for step in found}
        self.wrong += [f"{run}: step {step} occurs twice" for step in double]
        for step, values in found.items():
            if values != expected.get(step):
                self.wrong.append(f"{run}, step {step}: {values} instead of {expected.get(step)}")
        return found

    def follow(self, run: str, before: RunSnapshot, after: RunSnapshot) -> None:
        """Count the resumes between two snapshots of a run, and check from which step each started.

        A resume must start from the newest checkpoint of the first snapshot, or from a later one.
        """
        saved, newest = before.committed, after.committed
        for step in after.resumes[len(before.resumes) :]:
            self.resumes += 1
            if saved is not None and step < saved:
                self.lost.append(f"{run}: step {saved} was saved, resumed from {step}")
        if saved is not None and (newest is None or newest < saved):
            self.lost.append(f"{run}: step {saved} was saved, now the newest is {newest}")

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        seconds = [kill.seconds_to_end for kill in self.kills]
        return {
            **asdict(self),
            "compared": len(self.compared),
            "longest_seconds": max((value for value in seconds if value is not None), default=0),
            "by_phase": Counter(kill.phase for kill in self.kills),
            "by_target": Counter(kill.target for kill in self.kills),
        }

    def show(self) -> None:
        """Print a table of the kills by phase and target, and the result in words."""
        counts = Counter((kill.phase, kill.target) for kill in self.kills)
        targets = sorted({target for _, target in counts})
        rows = [(phase, [counts[phase, target] for target in targets]) for phase in PHASES]
        cells = [[phase, *map(str, found), str(sum(found))] for phase, found in rows]
        print_table(f"{len(self.kills)} kills", ["when", *targets, "total"], cells)
        longest = self.to_dict()["longest_seconds"]
        print(
            f"{self.resumes} resumes, {self.new_starts} new starts, {self.completed} runs "
            f"completed, the losses of {len(self.compared)} steps compared",
            f"{self.only_on_nodes} times the newest checkpoint was only on the nodes' disks",
            f"{len(self.lost)} lost commits, {len(self.wrong)} wrong losses, "
            f"{len(self.failed)} other failures",
            f"at most {longest:.1f} s from a kill to the end of all processes",
            *self.errors[:20],
            sep="\n",
        )


class KillRuns:
    """Kills runs, each in its own folder, and restarts every run until it is complete."""

    steps_ahead = 12
    """Kills that do not come during start-up come within so many steps after one has started."""

    def __init__(self, folder: Path, options: Namespace) -> None:
        steps = f"trainer.steps={options.steps}"
        self._overrides: tuple[str, ...] = (*OVERRIDES, *corpus_of(folder), steps)
        self._last_step, self._kills = options.steps, options.kills
        self._folder, self._random = folder, random.Random(options.seed)
        self._reference: Values = {}
        self._step_seconds = self._start_seconds = 0.0
        self.summary = KillSummary()

    def run(self, advance: Callable[[], None]) -> None:
        """Run the loop; stop early if a checkpoint is lost, a value is wrong or a run does not end.

        `advance` is called after each kill.

        Raises:
            TrainingError: the reference run failed.
        """
        self._measure_reference()
        while len(self.summary.kills) < self._kills and not self.summary.errors:
            self.summary.new_starts += 1
            run_dir = self._folder / f"run_{self.summary.new_starts}"
            snapshot: RunSnapshot | None = take_snapshot(run_dir)
            while snapshot is not None and not self.summary.errors:
                snapshot = self._attempt(run_dir, snapshot)
                if snapshot is not None:
                    advance()

    def _start(self, run_dir: Path) -> ForkedRun:
        """Start the processes of a run."""
        overrides = (*self._overrides, f"run.dir={run_dir}")
        return ForkedRun(train, overrides, run_dir.with_suffix(".log"))

    def _measure_reference(self) -> None:
        """Run without kills; keep the steps, and the times until the first step and per step."""
        run_dir = self._folder / "reference"
        processes, begin = self._start(run_dir), time.monotonic()
        _wait_for_step(run_dir, processes, 0)
        first_step = time.monotonic()
        processes.finish("the reference run")
        self._start_seconds = first_step - begin
        self._step_seconds = (time.monotonic() - first_step) / self._last_step
        self._reference, _ = read_steps(run_dir, "loss", "grad_norm")

    def _attempt(self, run_dir: Path, before: RunSnapshot) -> RunSnapshot | None:
        """Start a run and kill it, or wait for its end.

        `before` is its run directory before the start. Return the run directory after the kill;
        None if the run has ended by itself.
        """
        processes = self._start(run_dir)
        try:
            if len(self.summary.kills) < self._kills:
                self._wait_for_moment(run_dir, processes, before)
            else:
                processes.wait_for_end()
            now = take_snapshot(run_dir, processes.start_seconds)
            self._follow(run_dir.name, before, now)
            if processes.exit_code() is not None:
                self._check_ended(run_dir, processes, now)
                return None
            phase, target = now.phase(before.steps_started, self._last_step), self._hit(processes)
            seconds = processes.wait(LIMIT_SECONDS)
        finally:
            processes.end()
        self.summary.kills.append(Kill(target, phase, now.committed, seconds))
        if seconds is None:
            message = f"processes still ran {LIMIT_SECONDS:.0f} s after a kill of {target}"
            self.summary.failed.append(message)
        self.summary.compare(run_dir, self._reference)
        return self._settle(run_dir, now)

    def _follow(self, run: str, before: RunSnapshot, now: RunSnapshot) -> None:
        """Check from which step the run was resumed since the first snapshot."""
        self.summary.follow(run, before, now)

    def _settle(self, run_dir: Path, now: RunSnapshot) -> RunSnapshot | None:
        """Return what a kill has left of the run, whose snapshot was `now` right before it.

        None: nothing is left from which the run can be resumed.
        """
        after = take_snapshot(run_dir)
        self.summary.follow(run_dir.name, now, after)
        return after

    def _hit(self, processes: ForkedRun) -> Target:
        """Kill some processes of a run."""
        target: Target = self._random.choice(("all ranks", "one rank", "the parent"))
        return processes.kill(target, self._random)

    def _wait_for_moment(self, run_dir: Path, processes: ForkedRun, before: RunSnapshot) -> None:
        """Wait for a random moment of the run, or for its end."""
        begin = time.monotonic()
        if self._random.random() < SHARE_WHILE_STARTING:
            seconds = self._random.uniform(0, self._start_seconds)
        else:
            _wait_for_step(run_dir, processes, before.steps_started)
            # measured again, because the start-up of the reference run also prepared the corpus
            self._start_seconds = time.monotonic() - begin
            seconds = self._random.uniform(0, self.steps_ahead * self._step_seconds)
        deadline = time.monotonic() + seconds
        while processes.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _check_ended(self, run_dir: Path, processes: ForkedRun, now: RunSnapshot) -> None:
        """Check a run that has ended by itself."""
        exit_code, name = processes.exit_code(), run_dir.name
        found = self.summary.compare(run_dir, self._reference)
        if exit_code == REJECTED and now.committed is None and found:
            return  # as documented: a run with metrics and without a checkpoint cannot be resumed
        if exit_code:
            log = run_dir.with_suffix(".log").read_text(errors="replace")[-2000:]
            self.summary.failed.append(f"{name} ended with exit code {exit_code}:\n{log}")
            return
        self.summary.completed += 1
        if missing := self._reference.keys() - found.keys():
            self.summary.wrong.append(f"{name}: steps {sorted(missing)} are missing")


class NodeLosses(KillRuns):
    """Runs that lose one of their two nodes and what is on its disk."""

    steps_ahead = 25

    def __init__(self, folder: Path, options: Namespace) -> None:
        super().__init__(folder, options)
        self._disks, self._lost = folder / "disks", 0
        disk = f"checkpoint.tiers.local.path={self._disks}"
        self._overrides = (*self._overrides, *LEVELS, disk)

    def _hit(self, processes: ForkedRun) -> Target:
        self._lost = self._random.randrange(2)
        return processes.kill_node(self._lost)

    def _follow(self, run: str, before: RunSnapshot, now: RunSnapshot) -> None:
        for step in now.resumes[len(before.resumes) :]:
            self.summary.resumes += 1
            if before.committed is not None and step != before.committed:
                message = f"{run}: step {before.committed} was committed, resumed from {step}"
                self.summary.lost.append(message)

    def _settle(self, run_dir: Path, now: RunSnapshot) -> RunSnapshot | None:
        """Delete what is on the disk of the lost node; return the newest step that is left."""
        roots = list(self._disks.glob(f"{run_dir.name}-*"))
        for root in roots:
            for folder in (f"{NODE}{self._lost:05d}", f"{COPY}{1 - self._lost:05d}"):
                shutil.rmtree(root / folder, ignore_errors=True)
        shared = committed_steps(run_dir / FOLDER)
        on_nodes = [
            committed_steps(root / f"{NODE}{node:05d}")
            | committed_steps(root / f"{COPY}{node:05d}")
            for root in roots
            for node in range(2)
        ]
        complete = set.intersection(*on_nodes) if on_nodes else set[int]()
        newest = max(shared | complete, default=None)
        self.summary.only_on_nodes += newest is not None and newest not in shared
        return None if newest is None else replace(take_snapshot(run_dir), committed=newest)


def _wait_for_step(run_dir: Path, processes: ForkedRun, steps_before: int) -> None:
    """Wait until another step than those before has started, the run has ended, or a minute."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while processes.exit_code() is None and time.monotonic() < deadline:
        if take_snapshot(run_dir).steps_started > steps_before:
            return
        time.sleep(LOOK_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill runs as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--nodes", action="store_true", help="lose nodes and their disks")
    numbers = [
        ("kills", 1, 100, "total number of kills"),
        ("steps", 1, 100, "steps per run"),
        ("seed", 0, 1, "seed of the moments and targets of kills"),
    ]
    add_numbers(parser, numbers)
    options = parser.parse_args(arguments)
    import_training()
    with work_folder("kills") as folder, progress("kills", options.kills) as advance:
        runs = (NodeLosses if options.nodes else KillRuns)(folder, options)
        runs.run(advance)
    runs.summary.show()
    write_json(options, runs.summary.to_dict())
    return 1 if runs.summary.errors else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
