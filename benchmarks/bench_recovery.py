"""Compare the step time with and without recovery.enabled, while nothing dies.

    python -m benchmarks.bench_recovery                     # 6 rounds, about 4 minutes
    python -m benchmarks.bench_recovery --rounds 3 --json recovery.json
    python -m benchmarks.bench_recovery --copies --rounds 2    # recovery.partner_copies, 8 minutes

Both runs train the same GPT on 4 ranks (pipeline 2 x data 2, optimizer states with a copy). They
alternate, and the first steps of each run are left out. The expected ratio is 1: recovery adds no
communication to a step.

With --copies two ranks, each a node of its own, train a GPT of 19M parameters with 8,192 tokens per
step, and copy 113 MB of states per rank and step. Each byte is written, read, sent, received and
written again by the cores that train. At 2 GB/s for each of these this takes 0.3 s of a core.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.progress import track
from rich.table import Table

from benchmarks.bench_options import bench_parser
from benchmarks.faults.kill_loop import write_corpus
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.history import History

ROOT = Path(__file__).resolve().parents[1]
STEPS, SKIPPED = 40, 10
"""Steps of a run, and how many of them are not measured."""
OVERRIDES = (
    "model.layers=4", "model.hidden=128", "model.heads=4", "model.vocabulary=300", "data=text",
    "data.vocabulary=300", "data.sequence_length=128", "data.global_batch=8", "data.micro_batch=1",
    "launch.ranks=4", "parallel.pipeline=2", "precision=fp32", "sharding.params=1",
    "sharding.grads=1", "sharding.optimizer=1", "checkpoint=off", "plan=off", "run.resume=never",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    f"trainer.steps={STEPS}", "telemetry.wandb=off", "telemetry.progress=false",
)  # fmt: skip


COPIES = Path("/dev/shm")
"""Parent of the folder for copies in memory."""
WITH_COPIES = (
    "model.layers=6", "model.hidden=512", "model.heads=8", "data.global_batch=64",
    "data.micro_batch=4", "launch.ranks=2", "launch.ranks_per_node=1", "parallel.pipeline=1",
    "sharding.optimizer=2", "checkpoint=lazy", "checkpoint.every_steps=1000", "trainer.steps=7",
    "launch.threads=1",
)  # fmt: skip
"""A model whose states are long to copy, and a step that is long in proportion."""
SKIPPED_WITH_COPIES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds; return the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=6, help="rounds (default 6)")
    parser.add_argument("--copies", action="store_true", help="measure recovery.partner_copies")
    options = parser.parse_args(arguments)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="bench_recovery_") as name:
        folder = Path(name)
        keys = (*OVERRIDES, f"data.path={write_corpus(folder)}", f"data.directory={folder}/corpora")
        for number in track(range(options.rounds), "rounds"):
            for enabled in (False, True) if number % 2 else (True, False):
                run = folder / f"run_{number}_{enabled}"
                more = _more(run, copies=options.copies, enabled=enabled)
                skipped = SKIPPED_WITH_COPIES if options.copies else SKIPPED
                seconds[enabled].append(step_seconds((*keys, *more), run, skipped))
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    key = "recovery.partner_copies" if options.copies else "recovery.enabled"
    table = Table(key, "median step", "smallest", "largest")
    for enabled, name in ((False, "false"), (True, "true")):
        found = seconds[enabled]
        row = (median(found), min(found), max(found))
        table.add_row(name, *(f"{1e3 * value:.1f} ms" for value in row))
    bounds = median(ratios), min(ratios), max(ratios)
    table.add_row("ratio of a round", *(f"{value:.3f}" for value in bounds))
    wide_console().print(table)
    if options.json:
        result = {"seconds_off": seconds[False], "seconds_on": seconds[True], "ratios": ratios}
        load = os.getloadavg()[0]
        options.json.write_text(json.dumps({**result, "load": load, "cores": os.cpu_count()}))
    return 0


def _more(run: Path, *, copies: bool, enabled: bool) -> tuple[str, ...]:
    """Return the overrides of one contender."""
    value = str(enabled).lower()
    if not copies:
        return (f"recovery.enabled={value}",)
    path = COPIES / run.parent.name
    keys = f"recovery.partner_copies={value}", f"recovery.copies_path={path}"
    return (*WITH_COPIES, "recovery.enabled=true", *keys)


def step_seconds(keys: Sequence[str], run: Path, skipped: int) -> float:
    """Train in a process of its own; return the median time of a step in seconds.

    Args:
        keys: overrides of the run.
        run: its directory.
        skipped: number of steps at the beginning that are not measured.

    Raises:
        TrainingError: the run failed.
    """
    command = [sys.executable, str(ROOT / "train.py"), *keys, f"run.dir={run}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise TrainingError(f"a run failed:\n{ended.stderr[-2000:]}")
    return median(value for _, value in History.read(run).points("step_seconds")[skipped:])


if __name__ == "__main__":
    sys.exit(run_command(main))
