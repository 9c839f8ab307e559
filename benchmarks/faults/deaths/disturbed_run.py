"""A training run of 8 ranks in processes of its own, whose ranks can be killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
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


class DisturbedRun:
    """A run whose files are read and whose ranks are killed; subclasses start its processes."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.log = run.with_suffix(".log")

    def exit_code(self) -> int | None:
        """Return the exit code of the run; None while it runs."""
        raise NotImplementedError

    def kill_all(self) -> None:
        """Kill the processes that are left."""
        raise NotImplementedError

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
        found = {}
        for line in (self.run / "ranks.jsonl").read_text().splitlines():
            entry = json.loads(line)
            found[entry["rank"]] = entry["pid"], entry["generation"]
        return found

    def kill(self, ranks: Sequence[int]) -> set[int]:
        """Kill the processes of some ranks; return the ids of those that ran."""
        holders, killed = self.holders(), set()
        for rank in ranks:
            pid = holders[rank][0]
            try:
                os.kill(pid, 9)
                killed.add(pid)
            except ProcessLookupError:
                continue
        return killed

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


class LocalRun(DisturbedRun):
    """A run of the command line, whose launcher starts all ranks on this machine."""

    def __init__(self, run: Path, overrides: Sequence[str]) -> None:
        super().__init__(run)
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"run.dir={run}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment
        )

    def exit_code(self) -> int | None:
        """Return the exit code of the launcher; None while it runs."""
        return self.process.poll()

    def kill_all(self) -> None:
        """Kill the launcher, without which its ranks end."""
        self.process.kill()
        self.process.wait()
