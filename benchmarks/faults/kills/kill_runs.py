"""The loop of kills: start a run, kill it, compare it with the reference run, start it again."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.kills.forked_run import POLL_SECONDS, TARGETS, ForkedRun
from benchmarks.faults.kills.kill_summary import Kill, KillSummary
from benchmarks.faults.kills.restarted_run import Program, ReferenceRun, RestartedRun
from benchmarks.faults.kills.run_snapshot import RunSnapshot, read_steps, take_snapshot
from frontier_llm.telemetry.jsonl import METRICS_FILE

SHARE_WHILE_STARTING = 0.25
"""Share of the kills that come during start-up."""
STEPS_AHEAD = 12
"""All other kills come within this number of steps after a step has started."""
LIMIT_SECONDS = 60.0
"""Time limit for all processes of a run to end after a kill."""
REJECTED = 2
"""Exit code of a run that rejects its configuration or its directory."""


class KillRuns:
    """Kills runs, each in its own folder, and restarts every run until it is complete."""

    def __init__(self, program: Program, folder: Path, kills: int, random_: random.Random) -> None:
        """Store the settings; nothing is started yet.

        Args:
            program: the training program.
            folder: parent of the run directories.
            kills: number of kills.
            random_: chooses the moments and the targets of kills.
        """
        self._program, self._folder, self._kills = program, folder, kills
        self._random = random_
        self._reference: ReferenceRun
        self._start_seconds = 0.0
        self.summary = KillSummary()

    def run(self, show: Callable[[int], None]) -> None:
        """Run the loop; stop early if a checkpoint is lost, a value is wrong or a run does not end.

        Args:
            show: called with the number of kills so far.

        Raises:
            TrainingError: the reference run failed.
        """
        self._reference = ReferenceRun.measure(self._program, self._folder / "reference")
        self._start_seconds = self._reference.start_seconds
        number = 0
        while len(self.summary.kills) < self._kills and self.summary.is_clean:
            number += 1
            run = RestartedRun(self._program, self._folder / f"run_{number}")
            self.summary.new_starts += 1
            snapshot: RunSnapshot | None = take_snapshot(run.run_dir)
            while snapshot is not None and self.summary.is_clean:
                snapshot = self._attempt(run, snapshot)
                show(len(self.summary.kills))

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
            self.summary.follow(run.run_dir.name, before, now)
            if processes.exit_code() is not None:
                self._check_ended(run, processes, now)
                return None
            self._kill(processes, before, now)
        finally:
            processes.end()
        after = take_snapshot(run.run_dir)
        self.summary.follow(run.run_dir.name, now, after)
        self._compare(run)
        return after

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
            seconds = self._random.uniform(0, STEPS_AHEAD * self._reference.step_seconds)
        deadline = time.monotonic() + seconds
        while processes.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _kill(self, processes: ForkedRun, before: RunSnapshot, now: RunSnapshot) -> None:
        """Kill the processes, wait for their end, and record the kill.

        Args:
            processes: the processes of the run.
            before: the run directory before they were started.
            now: the run directory right before the kill.
        """
        phase = now.phase(before.steps_started, self._program.last_step)
        target = processes.kill(self._random.choice(TARGETS), self._random)
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
            self.summary.failed.append(
                f"{name} ended with exit code {exit_code}:\n{run.log_tail()}"
            )
            return
        self._compare(run)
        self.summary.completed += 1
        missing = self._reference.steps.keys() - read_steps(run.run_dir).keys()
        if missing:
            self.summary.wrong.append(f"{name}: steps {sorted(missing)} are missing")

    def _compare(self, run: RestartedRun) -> None:
        """Compare the steps of a run so far with those of the reference run."""
        name = run.run_dir.name
        try:
            self.summary.compare(name, read_steps(run.run_dir), self._reference.steps)
        except ValueError as error:
            self.summary.wrong.append(f"{name}: {error}")
