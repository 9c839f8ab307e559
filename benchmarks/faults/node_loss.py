"""Lose nodes while checkpoints are drained, and check that nothing committed is lost.

    python -m benchmarks.faults.node_loss                    # 100 losses, about 10 minutes
    python -m benchmarks.faults.node_loss --kills 10 --json losses.json

A tiny GPT trains on two nodes of two ranks. Every step is saved to the nodes' disks and copied to
the disk of the other node, and every 5th step is copied to the run directory. At a random moment
all ranks of one node are killed, and everything on its disk is deleted. The same command then
resumes the run.

Two rules are checked. A resumed run must start from the newest step that was committed in the run
directory, or both on the surviving node's disk and in the copy of the lost node. The loss and the
gradient norm of each step must equal those of an undisturbed run, bit by bit. The exit code is 1 if
a rule is broken. Works on Linux only.
"""

import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from benchmarks.bench_options import bench_parser
from benchmarks.faults.kill_loop import OVERRIDES, train, write_corpus
from benchmarks.faults.kills.forked_run import ForkedRun
from benchmarks.faults.kills.restarted_run import Program, ReferenceRun, RestartedRun
from benchmarks.faults.kills.run_snapshot import read_steps, take_snapshot
from frontier_llm.checkpoint.folders import COPY, FOLDER, NODE, parse_folder
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command

LEVELS = (
    "launch.ranks=4", "launch.ranks_per_node=2", "checkpoint.every_steps=5",
    "checkpoint.tiers.local.every_steps=1", "checkpoint.tiers.local.keep=2",
    "checkpoint.partner=true",
)  # fmt: skip
LIMIT_SECONDS = 60.0
"""Time limit for all processes of a run to end after a node is lost."""
_POLL_SECONDS = 0.01
STEPS_AHEAD = 25
"""A node is lost within this number of steps after a step has started."""


class NodeLosses:
    """Runs that lose nodes, and what was found.

    Attributes:
        found: numbers of losses by what followed.
        errors: messages about broken rules.
    """

    def __init__(self, program: Program, folder: Path, random_: random.Random) -> None:
        """Run the reference run.

        Args:
            program: the training program.
            folder: parent of the run directories.
            random_: chooses the moments and the nodes.
        """
        self._program, self._folder, self._random = program, folder, random_
        reference = self._at("reference")
        self._reference = ReferenceRun.measure(reference, folder / "reference")
        self.found: Counter[str] = Counter()
        self.errors: list[str] = []
        self._runs = 0

    def run(self, losses: int) -> None:
        """Lose nodes `losses` times; stop early at an error."""
        while self.found["losses"] < losses and not self.errors:
            self._runs += 1
            name = f"run_{self._runs}"
            run, expected = RestartedRun(self._at(name), self._folder / name), None
            is_over = False
            while not is_over and not self.errors:
                is_over, expected = self._attempt(run, expected, losses)

    def _at(self, name: str) -> Program:
        disk = f"checkpoint.tiers.local.path={self._folder}/disks_{name}"
        overrides = (*self._program.overrides, disk)
        return Program(self._program.train, overrides, self._program.last_step)

    def _attempt(
        self, run: RestartedRun, expected: int | None, losses: int
    ) -> tuple[bool, int | None]:
        """Start a run and lose a node.

        Args:
            run: the run.
            expected: step from which it must resume; None for a new run.
            losses: number of losses after which a run is not disturbed any more.

        Returns:
            Whether the run is over; and the step from which it must resume.
        """
        before = take_snapshot(run.run_dir)
        processes = run.start()
        try:
            if self.found["losses"] < losses:
                run.wait_for_step(processes, before.steps_started)
                self._wait(processes)
            else:
                processes.wait_for_end()
            code, node = processes.exit_code(), self._random.randrange(2)
            if code is None:
                processes.kill_ranks(range(2 * node, 2 * node + 2))
                if processes.wait(LIMIT_SECONDS) is None:
                    self.errors.append(f"{run.run_dir.name}: processes still run after a loss")
        finally:
            processes.end()
        self._check(run, expected, len(before.resumes), code)
        if code is not None:
            return True, None
        self.found["losses"] += 1
        self._lose(run.run_dir.name, node)
        return self._expect(run)

    def _wait(self, processes: ForkedRun) -> None:
        polls = int(
            self._random.uniform(0, STEPS_AHEAD * self._reference.step_seconds) / _POLL_SECONDS
        )
        for _ in range(polls):
            if processes.exit_code() is not None:
                return
            time.sleep(_POLL_SECONDS)

    def _lose(self, name: str, node: int) -> None:
        """Delete what is on the disk of a node."""
        for root in (self._folder / f"disks_{name}").glob("*"):
            for folder in (f"{NODE}{node:05d}", f"{COPY}{1 - node:05d}"):
                shutil.rmtree(root / folder, ignore_errors=True)

    def _expect(self, run: RestartedRun) -> tuple[bool, int | None]:
        """Return whether the run cannot be resumed, and the newest committed step."""
        shared = _steps(run.run_dir / FOLDER)
        name = run.run_dir.name
        parts = [
            _steps(root / f"{NODE}{node:05d}") | _steps(root / f"{COPY}{node:05d}")
            for root in (self._folder / f"disks_{name}").glob("*")
            for node in range(2)
        ]
        on_nodes = set.intersection(*parts) if parts else set[int]()
        newest = max(shared | on_nodes, default=None)
        if newest is not None:
            self.found["expected from copies" if newest not in shared else "expected shared"] += 1
        return newest is None, newest

    def _check(
        self, run: RestartedRun, expected: int | None, resumes: int, code: int | None
    ) -> None:
        now, name = take_snapshot(run.run_dir), run.run_dir.name
        for step in now.resumes[resumes:][:1]:
            self.found["resumes"] += 1
            if expected is not None and step != expected:
                self.errors.append(f"{name}: step {expected} was committed, resumed from {step}")
        for step, values in read_steps(run.run_dir).items():
            self.found["steps compared"] += 1
            if values != self._reference.steps[step]:
                self.errors.append(f"{name}, step {step}: {values} differs from the reference")
        if code:
            self.errors.append(f"{name} ended with exit code {code}:\n{run.log_tail()}")
        elif code == 0:
            self.found["completed runs"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Lose nodes as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=100, help="number of losses (default 100)")
    add("--steps", type=at_least(1), default=100, help="steps per run (default 100)")
    add("--seed", type=int, default=1, help="seed of the moments and nodes (default 1)")
    options = parser.parse_args(arguments)
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)  # once, before the forks
    with tempfile.TemporaryDirectory(prefix="node_loss_") as name:
        data = (f"data.path={write_corpus(Path(name))}", f"data.directory={name}/corpora")
        overrides = (*OVERRIDES, *LEVELS, *data, f"trainer.steps={options.steps}")
        losses = NodeLosses(
            Program(train, overrides, options.steps), Path(name), random.Random(options.seed)
        )
        losses.run(options.kills)
    console = wide_console()
    for key, count in losses.found.items():
        console.print(f"{key}: {count}")
    for error in losses.errors:
        console.print(error, highlight=False, markup=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps({**losses.found, "errors": losses.errors}, indent=1))
    return 1 if losses.errors else 0


def _steps(folder: Path) -> set[int]:
    """Return the steps of the committed checkpoints in a folder."""
    if not folder.is_dir():
        return set()
    parsed = (parse_folder(path.name) for path in folder.iterdir())
    return {found[0] for found in parsed if found is not None and not found[1]}


if __name__ == "__main__":
    sys.exit(run_command(main))
