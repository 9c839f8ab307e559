"""Training runs of 8 ranks whose ranks are killed: on this machine, or on simulated nodes."""

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchmarks.testbed.forked_run import ForkedRun, kill_processes, train
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
    """A run whose files are read and whose ranks are killed, in forked processes.

    The first process starts all ranks on this machine. On simulated nodes, each task of a node is a
    process in the namespace of the node, and `nodes` are the names of the namespaces.
    """

    def __init__(self, run: Path, overrides: Sequence[str], nodes: Sequence[str] = ()) -> None:
        self.run, self.log = run, run.with_suffix(".log")
        torch.set_num_threads(1)  # a process with a thread pool must not fork
        works: list[Callable[[Sequence[str]], int]] = [
            partial(_be_task, task, nodes) for task in range(len(nodes) * RANKS_PER_NODE)
        ]
        keys = (*overrides, f"run.dir={run}")
        self._tasks = [ForkedRun(work, keys, self.log) for work in works or [train]]

    def exit_code(self) -> int | None:
        """Return the exit code of the first process; None while it runs."""
        codes = [task.exit_code() for task in self._tasks]  # of all: ended ones are reaped
        return codes[0]

    def processes(self) -> list[int]:
        """Return the ids of all processes of the run."""
        return [pid for task in self._tasks for pid in task.processes()]

    def kill_all(self) -> None:
        """Kill the processes that are left."""
        for task in self._tasks:
            task.end()

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        try:
            return len((self.run / "metrics.jsonl").read_bytes().splitlines())
        except OSError:
            return 0

    def wait_beyond(self, step: int) -> bool:
        """Wait until a later step is done; return whether it was."""
        return self._wait(lambda: self.steps > step)

    def wait_until_replaced(self, pids: Collection[int]) -> None:
        """Wait until no rank is held by one of these processes, or the run is over."""
        self._wait(lambda: not any(pid in pids for pid, _ in self.holders().values()))

    def stop(self) -> int | None:
        """Ask the run to stop; return its exit code, or None if it does not stop."""
        (self.run / "STOP").touch()
        return self.wait_for_end()

    def wait_for_end(self) -> int | None:
        """Return the exit code of the run, or None if it does not end."""
        self._wait(lambda: False)
        return self.exit_code()

    def left_after(self, seconds: float) -> list[int]:
        """Wait until no process is left; return those that are, after a time limit."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            self.exit_code()
            time.sleep(0.05)
        return left

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, the end of the run, or the time limit; return the condition."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (holds := condition()):
            if self.exit_code() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return holds

    def holders(self) -> dict[int, tuple[int, int]]:
        """Return process id and first generation of each rank's process."""
        lines = (self.run / "ranks.jsonl").read_text().splitlines()
        return {e["rank"]: (e["pid"], e["generation"]) for e in map(json.loads, lines)}

    def kill(self, ranks: Iterable[int]) -> set[int]:
        """Kill the processes of some ranks; return the ids of those that ran."""
        holders = self.holders()
        return kill_processes(holders[rank][0] for rank in ranks)

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
