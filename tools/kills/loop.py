"""The loop: start, kill, look, compare, start again; run after run."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from frontier_llm.telemetry.jsonl import METRICS_FILE
from tools.kills.evidence import Scene, look, steps
from tools.kills.life import Life, Program, Undisturbed
from tools.kills.tally import Kill, Tally
from tools.kills.victim import POLL_SECONDS, TARGETS, Victim

SHARE_WHILE_STARTING = 0.25
STEPS_AHEAD = 12
"""A kill that does not come while a run starts comes within so many steps."""
LIMIT_SECONDS = 60.0
"""For all processes of a run to end after a kill."""
REFUSED = 2
"""Exit code of a run that says what is wrong with its configuration or its directory."""


class KillLoop:
    """Kills runs, each in a folder of its own, and sees every one of them to its end."""

    def __init__(self, program: Program, folder: Path, kills: int, random_: random.Random) -> None:
        """Prepare; nothing runs yet.

        Args:
            program: what is run.
            folder: takes the runs' directories.
            kills: how many.
            random_: chooses moments and targets.
        """
        self._program, self._folder, self._kills = program, folder, kills
        self._random = random_
        self._usual: Undisturbed
        self._start_seconds = 0.0
        self.tally = Tally()

    def run(self, show: Callable[[int], None]) -> None:
        """Do it; stop early where something is lost, wrong or stuck.

        Args:
            show: called with the number of kills so far.

        Raises:
            TrainingError: the run that nobody kills failed.
        """
        self._usual = Undisturbed.measure(self._program, self._folder / "undisturbed")
        self._start_seconds = self._usual.start_seconds
        number = 0
        while len(self.tally.kills) < self._kills and self.tally.is_clean:
            number += 1
            life = Life(self._program, self._folder / f"run_{number}")
            self.tally.new_starts += 1
            seen: Scene | None = look(life.run_dir)
            while seen is not None and self.tally.is_clean:
                seen = self._attempt(life, seen)
                show(len(self.tally.kills))

    def _attempt(self, life: Life, before: Scene) -> Scene | None:
        """Start a run, and kill it or see it end; return what it left if it is to go on."""
        victim = life.start()
        try:
            if len(self.tally.kills) < self._kills:
                self._await_moment(life, victim, before)
            else:
                victim.wait_for_end()
            now = look(life.run_dir, victim.start_seconds)
            self.tally.follow(life.run_dir.name, before, now)
            if victim.exit_code() is not None:
                self._conclude(life, victim, now)
                return None
            self._kill(victim, before, now)
        finally:
            victim.end()
        left = look(life.run_dir)
        self.tally.follow(life.run_dir.name, now, left)
        self._compare(life)
        return left

    def _await_moment(self, life: Life, victim: Victim, before: Scene) -> None:
        begin = time.monotonic()
        if self._random.random() < SHARE_WHILE_STARTING:
            seconds = self._random.uniform(0, self._start_seconds)
        else:
            life.await_step(victim, before.steps_read)
            self._start_seconds = time.monotonic() - begin  # the very first made the corpus too
            seconds = self._random.uniform(0, STEPS_AHEAD * self._usual.step_seconds)
        deadline = time.monotonic() + seconds
        while victim.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _kill(self, victim: Victim, before: Scene, now: Scene) -> None:
        phase = now.phase(before.steps_read, self._program.last_step)
        target = victim.kill(self._random.choice(TARGETS), self._random)
        seconds = victim.wait(LIMIT_SECONDS)
        self.tally.kills.append(Kill(target, phase, now.committed, seconds))
        if seconds is None:
            self.tally.failed.append(f"processes were left {LIMIT_SECONDS:.0f} s after {target}")

    def _conclude(self, life: Life, victim: Victim, now: Scene) -> None:
        """Judge a run that has ended by itself."""
        code, name = victim.exit_code(), life.run_dir.name
        trained = (life.run_dir / METRICS_FILE).exists()
        if code == REFUSED and now.committed is None and trained:
            return  # as documented: there is nothing to go on from, and it may not begin anew
        if code:
            self.tally.failed.append(f"{name} ended with {code}:\n{life.last_words()}")
            return
        self._compare(life)
        self.tally.completed += 1
        missing = self._usual.steps.keys() - steps(life.run_dir).keys()
        if missing:
            self.tally.wrong.append(f"{name}: steps {sorted(missing)} are not there")

    def _compare(self, life: Life) -> None:
        name = life.run_dir.name
        try:
            self.tally.compare(name, steps(life.run_dir), self._usual.steps)
        except ValueError as error:
            self.tally.wrong.append(f"{name}: {error}")
