"""A training run on simulated nodes, which can be killed one by one."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

import frontier_llm.cli.train
import frontier_llm.trainer.assemble  # noqa: F401  (imported once, before the fork)
from benchmarks.faults.deaths.disturbed_run import RANKS_PER_NODE, DisturbedRun
from benchmarks.testbed.namespaces import enter
from frontier_llm.cli.main import main as run_program

PORT = 29500


class NodesRun(DisturbedRun):
    """A run on simulated nodes: each task is a forked process in the namespace of its node."""

    def __init__(self, run: Path, overrides: Sequence[str], nodes: Sequence[str]) -> None:
        super().__init__(run)
        torch.set_num_threads(1)  # a process with a thread pool must not fork
        self._tasks = len(nodes) * RANKS_PER_NODE
        self._pids = []
        for task in range(self._tasks):
            pid = os.fork()
            if not pid:
                self._be_task(task, overrides, nodes)
            self._pids.append(pid)
        self._codes: dict[int, int] = {}

    def exit_code(self) -> int | None:
        """Return the exit code of task 0; None while it runs."""
        for task, pid in enumerate(self._pids):
            if task not in self._codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self._codes[task] = os.waitstatus_to_exitcode(ended[1])
        return self._codes.get(0)

    def kill_all(self) -> None:
        """Kill all processes that are left."""
        _kill(self.processes())

    def processes(self) -> list[psutil.Process]:
        """Return the processes of all tasks that run."""
        return _sessions(self._pids)

    def wait_for_processes(self, seconds: float) -> None:
        """Wait until no process is left."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            self.exit_code()
            time.sleep(0.05)

    def node_with_ranks(self) -> int:
        """Return the number of a node other than the first whose tasks have ranks."""
        with_ranks = {self._task_of(pid) // RANKS_PER_NODE for pid, _ in self.holders().values()}
        return max(with_ranks)

    def kill_node(self) -> set[int]:
        """Kill all processes of a node with ranks; return their ids."""
        first = self.node_with_ranks() * RANKS_PER_NODE
        return _kill(_sessions(self._pids[first : first + RANKS_PER_NODE]))

    def _task_of(self, rank_pid: int) -> int:
        """Return the task of the process of a rank; 0 if the process has ended."""
        try:
            parent = psutil.Process(rank_pid).ppid()
        except psutil.NoSuchProcess:
            return 0
        return self._pids.index(parent) if parent in self._pids else 0

    def _be_task(self, task: int, overrides: Sequence[str], nodes: Sequence[str]) -> None:
        """Run the program as a task of srun in this forked process, and exit."""
        code = 70
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            node, local = divmod(task, RANKS_PER_NODE)
            os.environ["GLOO_SOCKET_IFNAME"] = enter(nodes[node])
            os.environ |= {
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(local),
                "SLURM_NTASKS": str(self._tasks),
                "SLURM_STEP_NUM_TASKS": str(self._tasks),
                "SLURM_STEP_TASKS_PER_NODE": f"{RANKS_PER_NODE}(x{len(nodes)})",
                "SLURM_STEP_NODELIST": f"node[1-{len(nodes)}]",
                "SLURM_STEP_ID": "0",
                "SLURM_JOB_ID": "1",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(PORT),
            }
            code = run_program(["train", *overrides, f"run.dir={self.run}"])
        except BaseException:
            traceback.print_exc()  # nobody else would print it
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _sessions(leaders: Sequence[int]) -> list[psutil.Process]:
    """Return the processes that run in the sessions of some processes."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            ended = process.info["status"] == psutil.STATUS_ZOMBIE
            if not ended and os.getsid(process.pid) in leaders:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def _kill(processes: Sequence[psutil.Process]) -> set[int]:
    """Kill processes; return their ids."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return {process.pid for process in processes}
