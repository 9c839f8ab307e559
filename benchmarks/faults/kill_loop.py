"""Kill training runs at random moments, resume them, and check that nothing is lost or wrong.

    python -m benchmarks.faults.kill_loop                   # 200 kills, about 20 minutes
    python -m benchmarks.faults.kill_loop --kills 20 --seed 3 \
        --json benchmarks/results/kills_<cpu>_<date>.json

A tiny GPT trains on two ranks with a checkpoint after every step. SIGKILL is sent to all ranks, to
one of them, or to their parent. A quarter of the kills come during start-up, the others within the
next few steps. The same command then resumes the run (run.resume=auto). When the run is complete,
the next run begins. A run that is killed before its first checkpoint cannot be resumed, and a new
run begins instead.

Two rules are checked. The loss and the gradient norm of every step must equal those of a reference
run that is not killed, bit by bit. A resumed run must start from the newest checkpoint that existed
before the kill, or from a later one. The exit code is 1 if a checkpoint was lost, a value was wrong
or a process did not end. Works on Linux only.
"""

import importlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bench_options import bench_parser
from benchmarks.faults.kills.kill_runs import KillRuns
from benchmarks.faults.kills.kill_summary import KillSummary
from benchmarks.faults.kills.restarted_run import Program
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.main import main as run_program
from frontier_llm.cli.options import at_least, run_command

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = (
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocabulary=300", "data=text",
    "data.vocabulary=300", "data.sequence_length=32", "data.global_batch=4", "data.micro_batch=1",
    "launch.ranks=2", "parallel.pipeline=1", "sharding=zero1", "precision=fp32",
    "checkpoint=lazy", "checkpoint.every_steps=1", "run.resume=auto", "plan=off",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    "telemetry.wandb=off", "telemetry.progress=false",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill runs as often as the command line asks for; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=200, help="total number of kills (default 200)")
    add("--steps", type=at_least(1), default=100, help="steps per run (default 100)")
    add("--seed", type=int, default=1, help="seed of the moments and targets of kills (default 1)")
    options = parser.parse_args(arguments)
    summary = kill(options.kills, options.steps, options.seed)
    console = wide_console()
    console.print(summary.to_table())
    console.print(summary.to_text(), highlight=False, markup=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(summary.to_dict(), indent=1))
    return 0 if summary.is_clean else 1


def kill(kills: int, steps: int, seed: int) -> KillSummary:
    """Kill runs `kills` times; return the result.

    Args:
        kills: total number of kills.
        steps: steps per run.
        seed: seed of the moments and targets of kills.

    Raises:
        TrainingError: the reference run failed.
    """
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)  # once, before the forks
    columns = (TextColumn("kills"), MofNCompleteColumn(), TimeElapsedColumn())
    # without a thread that refreshes the bar, because this process forks
    with (
        tempfile.TemporaryDirectory(prefix="kill_loop_") as name,
        Progress(*columns, auto_refresh=False, transient=True) as progress,
    ):
        data = (f"data.path={write_corpus(Path(name))}", f"data.directory={name}/corpora")
        program = Program(train, (*OVERRIDES, *data, f"trainer.steps={steps}"), steps)
        runs = KillRuns(program, Path(name), kills, random.Random(seed))
        bar = progress.add_task("kills", total=kills)
        runs.run(lambda done: progress.update(bar, completed=done, refresh=True))
    return runs.summary


def train(overrides: Sequence[str]) -> int:
    """Train as the command line does; return the exit code."""
    return run_program(["train", *overrides])


def write_corpus(folder: Path) -> Path:
    """Write the source code of this package into one text file, to train on; return its path."""
    path = folder / "text.txt"
    sources = sorted((ROOT / "frontier_llm").rglob("*.py"))
    path.write_text("\n\n".join(source.read_text() for source in sources))
    return path


if __name__ == "__main__":
    sys.exit(run_command(main))
