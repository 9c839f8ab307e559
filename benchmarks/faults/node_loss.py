"""Lose nodes while checkpoints are drained, and check that nothing committed is lost.

    python -m benchmarks.faults.node_loss                    # 100 losses, about 10 minutes
    python -m benchmarks.faults.node_loss --kills 10 --json losses.json

As benchmarks/faults/kill_loop.py, but the GPT trains on two nodes of two ranks. Every step is saved
to the nodes' disks and copied to the disk of the other node, and every 5th step is copied to the
run directory. At a random moment all ranks of one node are killed, and everything on its disk is
deleted.

A resumed run must start from the newest step that was committed in the run directory, or both on
the surviving node's disk and in the copy of the lost node: neither from an earlier nor from a later
one. The losses are checked as in kill_loop.
"""

import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.kill_loop import KillRuns, kill_runs
from benchmarks.faults.run_files import RunSnapshot, committed_steps, take_snapshot
from benchmarks.testbed.forked_run import ForkedRun, Target
from frontier_llm.checkpoint.folders import COPY, FOLDER, NODE
from frontier_llm.cli.options import run_command

LEVELS = (
    "launch.ranks=4", "launch.ranks_per_node=2", "checkpoint.every_steps=5",
    "checkpoint.tiers.local.every_steps=1", "checkpoint.tiers.local.keep=2",
    "checkpoint.partner=true",
)  # fmt: skip


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Lose nodes as often as the command line asks for; return the exit code."""
    return kill_runs(NodeLosses, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
