"""Kill ranks of a running job at random moments, and check that the run is the undisturbed one.

    python -m benchmarks.faults.rank_deaths                  # 200 deaths of ranks, 10 minutes
    python -m benchmarks.faults.rank_deaths --optimizer 2    # states only in checkpoints
    python -m benchmarks.faults.rank_deaths --copies         # states in copies in memory

A tiny GPT trains on 8 ranks (tensor 2 x pipeline 2 x data 2) with recovery.enabled=true, evaluates
every 15 steps and saves every 10. SIGKILL is sent to a random rank 0.2 to 0.8 s after the last
recovery. 15% of the kills are followed by a second one within 0.8 s, while the first is being
repaired. benchmarks/faults/node_deaths.py kills nodes.

Checked: loss, gradient norm, samples and validation loss of every step equal those of a run that
is not disturbed, bit by bit; each step has one line in metrics.jsonl and one in ledger.jsonl; the
run ends by itself when asked to; no process is left. Reported: seconds from the last kill until the
first step of the new generation is done, and threads, descriptors and memory of the ranks by the
number of deaths that they have survived. The exit code is 1 if a check fails. Works on Linux only.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.progress import track

from benchmarks.bench_options import bench_parser
from benchmarks.faults.deaths.compared_steps import compare
from benchmarks.faults.deaths.death_outcome import Outcome, kill_and_wait, report
from benchmarks.faults.deaths.disturbed_run import OVERRIDES, RANKS, RANKS_PER_NODE, LocalRun
from benchmarks.faults.kill_loop import write_corpus
from frontier_llm.cli.options import at_least, run_command

COPIES = Path("/dev/shm")
"""Parent of the folder for copies in memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill ranks as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=200, help="number of kills (default 200)")
    add("--optimizer", type=int, default=1, choices=(1, 2), help="sharding.optimizer (default 1)")
    add(
        "--copies",
        action="store_true",
        help="sharding.optimizer=2, no other rank has the states, recovery.partner_copies=true",
    )
    add("--spares", type=int, default=0, help="recovery.spares (default 0)")
    add("--seed", type=int, default=1, help="seed of the moments and targets (default 1)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rank_deaths_") as name:
        folder = Path(name)
        overrides: tuple[str, ...] = (
            *OVERRIDES,
            f"data.path={write_corpus(folder)}",
            f"data.directory={folder}/corpora",
            f"sharding.optimizer={options.optimizer}",
            f"recovery.spares={options.spares}",
        )
        if options.copies:
            overrides += (
                f"launch.ranks_per_node={RANKS_PER_NODE}",
                "sharding.optimizer=2",
                "checkpoint.every_steps=100000",
            )
        outcome = disturb(folder, overrides, options)
        compare(folder, overrides, [folder / "disturbed"], outcome)
    return report(outcome, options)


def disturb(folder: Path, overrides: Sequence[str], options: Any) -> Outcome:
    """Run the job and kill its ranks; return what was measured."""
    outcome, draw = Outcome(), random.Random(options.seed)
    keys = [*overrides, "recovery.enabled=true"]
    if options.copies:
        keys += ["recovery.partner_copies=true", f"recovery.copies_path={COPIES}/{folder.name}"]
    run = LocalRun(folder / "disturbed", keys)
    try:
        if not run.wait_beyond(3):
            outcome.problems.append(f"the run did not start:\n{run.log.read_text()}")
            return outcome
        for _ in track(range(options.kills), "kills"):
            kill = partial(run.kill, [draw.randrange(RANKS)])
            if not kill_and_wait(run, kill, draw, outcome):
                return outcome
        code = run.stop()
        if code != 3:
            outcome.problems.append(f"exit code {code} instead of 3 after the request to stop")
    finally:
        run.kill_all()
        if (COPIES / folder.name).exists():
            outcome.problems += [f"{p} is left" for p in (COPIES / folder.name).iterdir()]
            shutil.rmtree(COPIES / folder.name)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run.run) in str(p.info["cmdline"])]
    outcome.problems += [f"process {process.pid} is left" for process in left]
    return outcome


if __name__ == "__main__":
    sys.exit(run_command(main))
