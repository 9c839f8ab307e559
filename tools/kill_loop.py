"""Kill training runs at random moments, resume them, and see whether anything is lost or wrong.

    python tools/kill_loop.py                   # 200 kills
    python tools/kill_loop.py --kills 20 --seed 3 --json FILE

A tiny GPT trains on two ranks with a checkpoint after every step. SIGKILL comes to all ranks, to
one of them, or to their parent; a quarter of the times while they start, else within the next few
steps. The same command then goes on (run.resume=auto), until the run is complete, and the next one
begins. A run that is killed before its first checkpoint has nothing to go on from; it begins anew.

Compared are: the loss and gradient norm of every step with those of an undisturbed run, to the
bit; the step from which a run goes on with the newest checkpoint that was there before the kill.
Exit code 1: something was lost, wrong or stuck. Linux only.
"""

import importlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import train
from tools.console import wide_console
from tools.kills.life import Program
from tools.kills.loop import KillLoop
from tools.kills.tally import Tally
from tools.options import at_least, bench_parser, ending

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = (
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocabulary=300", "data=text",
    "data.pieces=300", "data.sequence_length=32", "data.global_batch=4", "data.micro_batch=1",
    "launch.ranks=2", "parallel.pipeline=1", "sharding=zero1", "precision=fp32",
    "checkpoint=lazy", "checkpoint.every_steps=1", "run.resume=auto", "plan=off",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    "telemetry.wandb=off", "telemetry.progress=false",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=200, help="in all (default 200)")
    add("--steps", type=at_least(1), default=100, help="of a run (default 100)")
    add("--seed", type=int, default=1, help="of the moments and targets (default 1)")
    options = parser.parse_args(arguments)
    tally = kill(options.kills, options.steps, options.seed)
    console = wide_console()
    console.print(tally.to_table())
    console.print(tally.to_text(), highlight=False, markup=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(tally.to_dict(), indent=1))
    return 0 if tally.is_clean else 1


def kill(kills: int, steps: int, seed: int) -> Tally:
    """Kill runs so often; return what came of it.

    Raises:
        TrainingError: a run that nobody killed failed.
    """
    importlib.import_module("frontier_llm.trainer.assemble")  # once, here: the runs fork with it
    columns = (TextColumn("kills"), MofNCompleteColumn(), TimeElapsedColumn())
    # No refresher thread: this process forks.
    with (
        tempfile.TemporaryDirectory(prefix="kill_loop_") as name,
        Progress(*columns, auto_refresh=False, transient=True) as progress,
    ):
        data = (f"data.path={_corpus(Path(name))}", f"data.directory={name}/corpora")
        program = Program(train.main, (*OVERRIDES, *data, f"trainer.steps={steps}"), steps)
        loop = KillLoop(program, Path(name), kills, random.Random(seed))
        bar = progress.add_task("kills", total=kills)
        loop.run(lambda done: progress.update(bar, completed=done, refresh=True))
    return loop.tally


def _corpus(folder: Path) -> Path:
    """Write a small text: this repository's own sources."""
    path = folder / "text.txt"
    sources = sorted((ROOT / "frontier_llm").rglob("*.py"))
    path.write_text("\n\n".join(source.read_text() for source in sources))
    return path


if __name__ == "__main__":
    sys.exit(ending(main))
