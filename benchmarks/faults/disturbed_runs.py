"""Training runs of 8 ranks whose ranks are killed: on this machine, or on simulated nodes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.harness import ROOT
from benchmarks.testbed.forked_run import ForkedRun, train
from benchmarks.testbed.namespaces import enter

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
PORT = 29500


class DisturbedRun:
    """A run whose files are read and whose ranks are killed; subclasses start its processes."""

    def __init__(self, run: Path) -> None:
        self.run, self.log = run, run.with_suffix(".log")

    def exit_code(self) -> int | None:
        """Return the exit code of the run; None while it runs."""
        raise NotImplementedError

    def processes(self) -> list[int]:
        """Return the ids of all processes of the run."""
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
        lines = (self.run / "ranks.jsonl").read_text().splitlines()
        return {e["rank"]: (e["pid"], e["generation"]) for e in map(json.loads, lines)}

    def kill(self, ranks: Iterable[int]) -> set[int]:
        """Kill the processes of some ranks; return the ids of those that ran."""
        holders = self.holders()
        return kill_processes(holders[rank][0] for rank in ranks)

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

    def left_after(self, seconds: float) -> list[int]:
        """Wait until no process is left; return those that are, after a time limit."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            self.exit_code()
            time.sleep(0.05)
        return left


class LocalRun(DisturbedRun):
    """A run of the command line, whose launcher starts all ranks on this machine."""

    def __init__(self, run: Path, overrides: Sequence[str]) -> None:
        super().__init__(run)
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

    def processes(self) -> list[int]:
        """Return the launcher and all ranks, which have its command line."""
        found = psutil.process_iter(["cmdline"])
        return [p.pid for p in found if f"run.dir={self.run}" in (p.info["cmdline"] or ())]

    def kill_all(self) -> None:
        """Kill the launcher, without which its ranks end."""
        self._launcher.kill()
        self._launcher.wait()


class NodesRun(DisturbedRun):
    """A run on simulated nodes: each task is a forked process in the namespace of its node."""

    def __init__(self, run: Path, overrides: Sequence[str], nodes: Sequence[str]) -> None:
        super().__init__(run)
        torch.set_num_threads(1)  # a process with a thread pool must not fork
        self._tasks = [
            ForkedRun(partial(_be_task, task, nodes), (*overrides, f"run.dir={run}"), self.log)
            for task in range(len(nodes) * RANKS_PER_NODE)
        ]

    def exit_code(self) -> int | None:
        """Return the exit code of task 0; None while it runs."""
        codes = [task.exit_code() for task in self._tasks]  # of all: ended ones are reaped
        return codes[0]

    def processes(self) -> list[int]:
        """Return the processes of all tasks."""
        return [pid for task in self._tasks for pid in task.processes()]

    def kill_all(self) -> None:
        """Kill all processes of all tasks."""
        for task in self._tasks:
            task.end()

    def kill_node(self) -> set[int]:
        """Kill all processes of the last node with ranks; return their ids."""
        sessions = [task.pid for task in self._tasks]
        with_ranks = {0}
        for pid, _ in self.holders().values():
            with suppress(ProcessLookupError):
                with_ranks.add(sessions.index(os.getsid(pid)) // RANKS_PER_NODE)
        first = max(with_ranks) * RANKS_PER_NODE
        tasks = self._tasks[first : first + RANKS_PER_NODE]
        return kill_processes([pid for task in tasks for pid in task.processes()])


def kill_processes(pids: Iterable[int]) -> set[int]:
    """Send SIGKILL to processes; return the ids of those that ran."""
    killed = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
            killed.add(pid)
    return killed


def _be_task(task: int, nodes: Sequence[str], overrides: Sequence[str]) -> int:
    """Run the program as a task of srun in this process; return its exit code."""
    node, local = divmod(task, RANKS_PER_NODE)
    tasks = str(len(nodes) * RANKS_PER_NODE)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": enter(nodes[node]),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": tasks,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": f"{RANKS_PER_NODE}(x{len(nodes)})",
        "SLURM_STEP_NODELIST": f"node[1-{len(nodes)}]",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": str(PORT),
    }
    return train(overrides)
