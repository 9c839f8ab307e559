"""Kill the ranks of simulated nodes, or whole nodes, and check that the run is the undisturbed one.

    python -m benchmarks.faults.node_deaths                  # 50 times the 4 ranks of a node
    python -m benchmarks.faults.node_deaths --whole          # 50 whole nodes, about 10 minutes

A tiny GPT trains on 8 ranks (tensor 2 x data 4, sharding.optimizer=2). Each node is a network
namespace with an address of its own, and has four tasks, which get the variables of srun.

By default all four ranks of a random node are killed at once, and the tasks of the node start
others. With --whole every process of a node is killed, its tasks included, and tasks of a node that
waits take over. The node of task 0 is spared then, because the job ends with it. When no node waits
any more, the run is asked to stop, and the next run begins.

15% of the kills are followed by that of a random rank within 0.8 s. What is checked and reported is
described in benchmarks/faults/rank_deaths.py. Needs Linux, root and iproute2.
"""

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from rich.progress import Progress

from benchmarks.bench_options import bench_parser
from benchmarks.faults.deaths.compared_steps import compare
from benchmarks.faults.deaths.death_outcome import Outcome, kill_and_wait, report
from benchmarks.faults.deaths.disturbed_run import OVERRIDES, RANKS, RANKS_PER_NODE
from benchmarks.faults.deaths.nodes_run import NodesRun
from benchmarks.faults.kill_loop import write_corpus
from benchmarks.testbed.namespaces import namespaces
from frontier_llm.cli.options import at_least, run_command

NODES = RANKS // RANKS_PER_NODE
SPARE_NODES = 5
"""Nodes that wait at the start of a run with --whole."""
FIRST_KILL = 10
"""Number of steps before the first kill: there is a checkpoint then, in case that two kills at once
destroy all copies of a state."""
RATE = "40gbit"
"""Rate of a link: far above what this machine can send."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill nodes as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=50, help="number of kills (default 50)")
    add("--whole", action="store_true", help="kill all processes of a node, not only its ranks")
    add("--seed", type=int, default=1, help="seed of the moments and targets (default 1)")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="node_deaths_"))
    overrides = (
        *OVERRIDES,
        f"data.path={write_corpus(folder)}",
        f"data.directory={folder}/corpora",
        f"launch.ranks_per_node={RANKS_PER_NODE}",
        "parallel.pipeline=1",
        "sharding.optimizer=2",
    )
    outcome, runs = disturb(folder, overrides, options)
    compare(folder, overrides, runs, outcome)
    code = report(outcome, options)
    if code:
        print(f"the runs are kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return code


def disturb(folder: Path, overrides: Sequence[str], options: Any) -> tuple[Outcome, list[Path]]:
    """Run jobs and kill their nodes; return what was measured, and the run directories."""
    outcome, draw, left = Outcome(), random.Random(options.seed), options.kills
    spare = SPARE_NODES if options.whole else 0
    keys = (*overrides, "recovery.enabled=true", f"recovery.spares={spare * RANKS_PER_NODE}")
    runs: list[Path] = []
    # without its thread: this process forks
    with Progress(auto_refresh=False) as progress, namespaces(NODES + spare, RATE) as nodes:
        bar = progress.add_task("kills", total=options.kills)
        while left and not outcome.problems:
            run = NodesRun(folder / f"disturbed_{len(runs)}", keys, nodes)
            count = min(left, spare) if options.whole else left
            left -= count
            try:
                if not run.wait_beyond(FIRST_KILL):
                    outcome.problems.append(f"the run did not start:\n{run.log.read_text()}")
                    break
                runs.append(run.run)
                for _ in range(count):
                    first = draw.randrange(NODES) * RANKS_PER_NODE
                    ranks = range(first, first + RANKS_PER_NODE)
                    kill = run.kill_node if options.whole else partial(run.kill, ranks)
                    if not kill_and_wait(run, kill, draw, outcome):
                        break
                    progress.update(bar, advance=1, refresh=True)
                if (code := run.stop()) != 3:
                    outcome.problems.append(f"exit code {code} instead of 3 after STOP")
                run.wait_for_processes(30)
                outcome.problems += [f"process {p.pid} is left" for p in run.processes()]
            finally:
                run.kill_all()
    return outcome, runs


if __name__ == "__main__":
    sys.exit(run_command(main))
