"""Kill training runs at random moments, resume them, and check that nothing is lost or wrong.

    python -m benchmarks.faults.kill_loop                   # 100 kills, about 10 minutes
    python -m benchmarks.faults.kill_loop --kills 20 --seed 3 \
        --json benchmarks/results/kills_<cpu>_<date>.json

A tiny GPT trains on two ranks with a checkpoint after every step. SIGKILL is sent to all ranks, to
one of them, or to their parent. A quarter of the kills come during start-up, the others within the
next few steps. The same command then resumes the run (run.resume=auto). When the run is complete,
the next run begins. A run that is killed before its first checkpoint cannot be resumed, and a new
run begins instead.

Two rules are checked. The loss and the gradient norm of every step must equal those of a reference
run that is not killed, bit by bit. A resumed run must start from the newest checkpoint that existed
before the kill, or from a later one. The exit code is 1 if a checkpoint was lost, a value was wrong
or a process did not end. Works on Linux only. benchmarks/faults/node_loss.py kills nodes.
"""

import json
import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.harness import (
    add_numbers,
    bench_console,
    bench_parser,
    make_table,
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
from frontier_llm.checkpoint.folders import COMMITTED, FOLDER, parse_folder
from frontier_llm.cli.options import run_command
from frontier_llm.saving.ledger_file import LEDGER
from frontier_llm.telemetry.jsonl import METRICS_FILE

SHARE_WHILE_STARTING = 0.25
"""Share of the kills that come during start-up."""
LIMIT_SECONDS = 60.0
"""Time limit for all processes of a run to end after a kill, and for its first step to start."""
LOOK_SECONDS = 0.02
"""Interval at which the run directory is read."""
REJECTED = 2
"""Exit code of a run that rejects its configuration or its directory."""

Phase = Literal[
    "starting", "before the first checkpoint", "between saves", "during a save", "at the end"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What a run was doing when it was killed."""
Step = tuple[float, float]
"""Loss and gradient norm of a step, as written to metrics.jsonl."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run directory at one moment."""

    committed: int | None
    """Step of the newest checkpoint whose folder has its final name; None if there is none."""
    is_saving: bool
    """Whether a later checkpoint is being written."""
    steps_started: int
    """Number of steps that have been started, counting repeated ones each time."""
    resumes: tuple[int, ...]
    """Steps from which the run has been resumed so far."""

    def phase(self, steps_before: int, last_step: int) -> Phase:
        """Return what the run does, given `steps_started` when its processes were started."""
        if self.steps_started == steps_before:
            return "starting" if self.committed != last_step else "at the end"
        if self.committed is None:
            return "before the first checkpoint"
        if self.committed == last_step:
            return "at the end"
        return "during a save" if self.is_saving else "between saves"


def take_snapshot(run_dir: Path, since: float = 0.0) -> RunSnapshot:
    """Read a run directory, which may be absent.

    `since` is when the processes of the run were started, in seconds since 1970. Partial
    checkpoints that are older were left by a killed process, and nothing writes to them.
    """
    committed, partial = [], []
    folder = run_dir / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        step, kind = parse_folder(path.name) or (0, "none")
        if kind in COMMITTED:
            committed.append(step)
        elif kind == ".partial" and _last_write(path) >= since:
            partial.append(step)
    newest = max(committed, default=None)
    entries = list(_lines(run_dir / LEDGER))
    return RunSnapshot(
        committed=newest,
        is_saving=max(partial, default=-1) > (-1 if newest is None else newest),
        steps_started=sum("event" not in entry for entry in entries),
        resumes=tuple(entry["step"] for entry in entries if entry.get("event") == "resume"),
    )


def read_steps(run_dir: Path) -> dict[int, Step]:
    """Return the loss and the gradient norm of each step in metrics.jsonl.

    Raises:
        ValueError: a step occurs twice, or a line is not JSON.
    """
    found: dict[int, Step] = {}
    for line in _lines(run_dir / METRICS_FILE):
        if line["step"] in found:
            raise ValueError(f"step {line['step']} occurs twice")
        found[line["step"]] = (line["loss"], line["grad_norm"])
    return found


def _last_write(folder: Path) -> float:
    """Return when a folder or a file in it was last written, in seconds since 1970."""
    times = [0.0]
    try:
        times += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    except FileNotFoundError:
        pass  # the folder has just been renamed to its final name
    return max(times)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON lines file; none if the file is absent."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"}\n"):
            yield json.loads(line)


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
    def is_clean(self) -> bool:
        """Whether no error was found."""
        return not (self.lost or self.wrong or self.failed)

    @property
    def longest_seconds(self) -> float:
        """Longest time in seconds from a kill to the end of all processes of the run."""
        seconds = (kill.seconds_to_end for kill in self.kills)
        return max((value for value in seconds if value is not None), default=0)

    def compare(self, run: str, found: dict[int, Step], expected: dict[int, Step]) -> None:
        """Compare the steps of a run with those of the reference run."""
        self.compared |= {(run, step) for step in found}
        for step, values in found.items():
            if values != expected.get(step):
                self.wrong.append(f"{run}, step {step}: {values} instead of {expected.get(step)}")

    def follow(self, run: str, before: RunSnapshot, after: RunSnapshot) -> None:
        """Count the resumes between two snapshots of a run, and check from which step each started.

        A resume must start from the newest checkpoint of the first snapshot, or from a later one.
        """
        for step in after.resumes[len(before.resumes) :]:
            self.resumes += 1
            if before.committed is not None and step < before.committed:
                self.lost.append(f"{run}: step {before.committed} was saved, resumed from {step}")
        newest = after.committed
        if before.committed is not None and (newest is None or newest < before.committed):
            self.lost.append(
                f"{run}: step {before.committed} was saved, now the newest is {newest}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            **asdict(self),
            "compared": len(self.compared),
            "longest_seconds": self.longest_seconds,
            "by_phase": Counter(kill.phase for kill in self.kills),
            "by_target": Counter(kill.target for kill in self.kills),
        }

    def to_table(self) -> Table:
        """Return a table of the kills by phase and target."""
        counts = Counter((kill.phase, kill.target) for kill in self.kills)
        targets = sorted({target for _, target in counts})
        rows = [(phase, [counts[phase, target] for target in targets]) for phase in PHASES]
        cells = [[phase, *map(str, found), str(sum(found))] for phase, found in rows]
        return make_table(f"{len(self.kills)} kills", ["when", *targets, "total"], cells)

    def to_text(self) -> str:
        """Return the result as a few lines of text."""
        errors = [*self.lost, *self.wrong, *self.failed]
        return "\n".join(
            [
                f"{self.resumes} resumes, {self.new_starts} new starts, {self.completed} runs "
                f"completed, the losses of {len(self.compared)} steps compared",
                f"{self.only_on_nodes} times the newest checkpoint was only on the nodes' disks",
                f"{len(self.lost)} lost commits, {len(self.wrong)} wrong losses, "
                f"{len(self.failed)} other failures",
                f"at most {self.longest_seconds:.1f} s from a kill to the end of all processes",
                *errors[:20],
            ]
        )


class RestartedRun:
    """A run directory, and the starts of the run in it."""

    def __init__(self, overrides: Sequence[str], run_dir: Path) -> None:
        self._overrides, self.run_dir = (*overrides, f"run.dir={run_dir}"), run_dir
        self.log = run_dir.with_suffix(".log")

    def start(self) -> ForkedRun:
        """Start the processes of the run."""
        return ForkedRun(train, self._overrides, self.log)

    def wait_for_step(self, processes: ForkedRun, steps_before: int) -> None:
        """Wait until another step than those before has started, the run has ended, or a minute."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while processes.exit_code() is None and time.monotonic() < deadline:
            if take_snapshot(self.run_dir).steps_started > steps_before:
                return
            time.sleep(LOOK_SECONDS)


class KillRuns:
    """Kills runs, each in its own folder, and restarts every run until it is complete."""

    steps_ahead = 12
    """Kills that do not come during start-up come within so many steps after one has started."""

    def __init__(self, folder: Path, options: Namespace) -> None:
        steps = f"trainer.steps={options.steps}"
        self._overrides: tuple[str, ...] = (*OVERRIDES, *corpus_of(folder), steps)
        self._last_step, self._kills = options.steps, options.kills
        self._folder, self._random = folder, random.Random(options.seed)
        self._reference: dict[int, Step] = {}
        self._step_seconds = self._start_seconds = 0.0
        self.summary = KillSummary()

    def run(self, show: Callable[[int], None]) -> None:
        """Run the loop; stop early if a checkpoint is lost, a value is wrong or a run does not end.

        Args:
            show: called with the number of kills so far.

        Raises:
            TrainingError: the reference run failed.
        """
        self._measure_reference()
        number = 0
        while len(self.summary.kills) < self._kills and self.summary.is_clean:
            number += 1
            run = RestartedRun(self._overrides, self._folder / f"run_{number}")
            self.summary.new_starts += 1
            snapshot: RunSnapshot | None = take_snapshot(run.run_dir)
            while snapshot is not None and self.summary.is_clean:
                snapshot = self._attempt(run, snapshot)
                show(len(self.summary.kills))

    def _measure_reference(self) -> None:
        """Run without kills; keep the steps, and the times until the first step and per step."""
        run = RestartedRun(self._overrides, self._folder / "reference")
        processes, begin = run.start(), time.monotonic()
        run.wait_for_step(processes, 0)
        first_step = time.monotonic()
        processes.finish("the reference run")
        self._start_seconds = first_step - begin
        self._step_seconds = (time.monotonic() - first_step) / self._last_step
        self._reference = read_steps(run.run_dir)

    def _attempt(self, run: RestartedRun, before: RunSnapshot) -> RunSnapshot | None:
        """Start a run and kill it, or wait for its end.

        Args:
            run: the run.
            before: its run directory before the start.

        Returns:
            The run directory after the kill; None if the run has ended by itself.
        """
        processes = run.start()
        try:
            if len(self.summary.kills) < self._kills:
                self._wait_for_moment(run, processes, before)
            else:
                processes.wait_for_end()
            now = take_snapshot(run.run_dir, processes.start_seconds)
            self._follow(run, before, now)
            if processes.exit_code() is not None:
                self._check_ended(run, processes, now)
                return None
            self._kill(processes, before, now)
        finally:
            processes.end()
        self._compare(run)
        return self._settle(run, now)

    def _follow(self, run: RestartedRun, before: RunSnapshot, now: RunSnapshot) -> None:
        """Check from which step the run was resumed since the first snapshot."""
        self.summary.follow(run.run_dir.name, before, now)

    def _settle(self, run: RestartedRun, now: RunSnapshot) -> RunSnapshot | None:
        """Return what a kill has left of the run, whose snapshot was `now` right before it.

        None: nothing is left from which the run can be resumed.
        """
        after = take_snapshot(run.run_dir)
        self.summary.follow(run.run_dir.name, now, after)
        return after

    def _hit(self, processes: ForkedRun) -> Target:
        """Kill some processes of a run."""
        target: Target = self._random.choice(("all ranks", "one rank", "the parent"))
        return processes.kill(target, self._random)

    def _wait_for_moment(
        self, run: RestartedRun, processes: ForkedRun, before: RunSnapshot
    ) -> None:
        """Wait for a random moment of the run, or for its end."""
        begin = time.monotonic()
        if self._random.random() < SHARE_WHILE_STARTING:
            seconds = self._random.uniform(0, self._start_seconds)
        else:
            run.wait_for_step(processes, before.steps_started)
            # measured again, because the start-up of the reference run also prepared the corpus
            self._start_seconds = time.monotonic() - begin
            seconds = self._random.uniform(0, self.steps_ahead * self._step_seconds)
        deadline = time.monotonic() + seconds
        while processes.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _kill(self, processes: ForkedRun, before: RunSnapshot, now: RunSnapshot) -> None:
        """Kill the processes, wait for their end, and record the kill.

        `before` is the run directory before they were started, `now` right before the kill.
        """
        phase = now.phase(before.steps_started, self._last_step)
        target = self._hit(processes)
        seconds = processes.wait(LIMIT_SECONDS)
        self.summary.kills.append(Kill(target, phase, now.committed, seconds))
        if seconds is None:
            self.summary.failed.append(
                f"processes still ran {LIMIT_SECONDS:.0f} s after a kill of {target}"
            )

    def _check_ended(self, run: RestartedRun, processes: ForkedRun, now: RunSnapshot) -> None:
        """Check a run that has ended by itself."""
        exit_code, name = processes.exit_code(), run.run_dir.name
        has_metrics = (run.run_dir / METRICS_FILE).exists()
        if exit_code == REJECTED and now.committed is None and has_metrics:
            return  # as documented: a run with metrics and without a checkpoint cannot be resumed
        if exit_code:
            log = run.log.read_text(errors="replace")[-2000:]
            self.summary.failed.append(f"{name} ended with exit code {exit_code}:\n{log}")
            return
        self._compare(run)
        self.summary.completed += 1
        missing = self._reference.keys() - read_steps(run.run_dir).keys()
        if missing:
            self.summary.wrong.append(f"{name}: steps {sorted(missing)} are missing")

    def _compare(self, run: RestartedRun) -> None:
        """Compare the steps of a run so far with those of the reference run."""
        name = run.run_dir.name
        try:
            self.summary.compare(name, read_steps(run.run_dir), self._reference)
        except ValueError as error:
            self.summary.wrong.append(f"{name}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill runs as often as the command line asks for; return the exit code."""
    return kill_runs(KillRuns, __doc__, arguments)


def kill_runs(kind: type[KillRuns], doc: str | None, arguments: Sequence[str] | None) -> int:
    """Kill runs of a kind as often as the command line asks for; return the exit code."""
    parser = bench_parser(doc)
    add_numbers(
        parser,
        [
            ("kills", 1, 100, "total number of kills"),
            ("steps", 1, 100, "steps per run"),
            ("seed", 0, 1, "seed of the moments and targets of kills"),
        ],
    )
    options = parser.parse_args(arguments)
    import_training()
    columns = (TextColumn("kills"), MofNCompleteColumn(), TimeElapsedColumn())
    # without a thread that refreshes the bar, because this process forks
    with (
        work_folder("kills") as folder,
        Progress(*columns, auto_refresh=False, transient=True) as progress,
    ):
        runs = kind(folder, options)
        bar = progress.add_task("kills", total=options.kills)
        runs.run(lambda done: progress.update(bar, completed=done, refresh=True))
    console = bench_console()
    console.print(runs.summary.to_table())
    console.print(runs.summary.to_text(), markup=False, soft_wrap=True)
    write_json(options, runs.summary.to_dict())
    return 0 if runs.summary.is_clean else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
