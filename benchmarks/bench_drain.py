"""Measure how much saves to the nodes' disks and drains to the run directory slow down training.

    python -m benchmarks.bench_drain                       # a GPT of 13M parameters, 10 minutes
    python -m benchmarks.bench_drain --quick               # a smoke test
    python -m benchmarks.bench_drain --folder /mnt/bb/$USER --json FILE

Two ranks, each a node of its own, train a GPT in fp32 on a CPU. The contenders take turns, in the
reverse order in every second round:
    none      no checkpoints
    node      a checkpoint on the nodes' disks after every step
    drain     as `node`; every 5th checkpoint is also copied to the run directory
    partner   as `drain`; all checkpoints are also copied to the other node's disk
    limited   as `drain`, at 50 MB/s per node
    slow wait as `node`, but the disk needs as long as 10 steps for the checkpoint of one step
    slow skip as `slow wait`, with checkpoint.when_busy=skip
A rank on a slow disk sleeps after each write for the rest of the time that the disk would need. All
folders are on one disk, which the nodes of a cluster would not share. The table shows the median
over rounds of the mean time per step, without the first three steps and the end of the run, and the
part of it for which training waited. A ratio compares with `none` in the same round. `saved` is the
share of the steps whose checkpoint was begun.
"""

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

import torch
from rich.table import Table

from benchmarks.bench_options import bench_parser
from benchmarks.faults.kill_loop import OVERRIDES, train, write_corpus
from benchmarks.faults.kills.forked_run import ForkedRun
from benchmarks.testbed import machine
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import run_command
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.jsonl import METRICS_FILE

CONTENDERS: dict[str, tuple[str, ...]] = {
    "none": ("checkpoint=off",),
    "node": ("checkpoint.every_steps=1000",),
    "drain": ("checkpoint.every_steps=5",),
    "partner": ("checkpoint.every_steps=5", "checkpoint.partner=true"),
    "limited": ("checkpoint.every_steps=5", "checkpoint.drain_mb_per_second=50"),
    "slow wait": ("checkpoint.every_steps=1000",),
    "slow skip": ("checkpoint.every_steps=1000", "checkpoint.when_busy=skip"),
}
SLOWNESS = 10
"""How many steps a slow disk needs for the checkpoint of one step."""
SIZE = ("model.layers=4", "model.hidden=512", "model.heads=8", "data.sequence_length=256")
Means = tuple[float, float, float]
"""Means over steps: seconds, of which waiting; share of the steps whose checkpoint was begun."""
WARM_UP = 3
"""Steps that are not counted."""
FEW_STEPS = 12
"""Steps of a run that waits for a slow disk after each of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = bench_parser(
        __doc__, rounds=3, folder_for="folder of all checkpoints", quick="a tiny model, one round"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS),
        help="contenders beside `none` (default all)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    contenders = [name for name in CONTENDERS if name in ("none", *options.contenders)]
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)  # once, before the forks
    rounds, most = (1, FEW_STEPS) if options.quick else (options.rounds, 31)
    rows: dict[str, list[Means]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(prefix="bench_drain_", dir=options.folder) as name:
        folder = Path(name)
        data = (f"data.path={write_corpus(folder)}", f"data.directory={folder}/corpora")
        size = () if options.quick else SIZE
        for number in range(rounds):
            for contender in contenders[:: -1 if number % 2 else 1]:
                steps = FEW_STEPS if contender == "slow wait" else most
                keys = (f"trainer.steps={steps}", *CONTENDERS[contender])
                overrides = (*OVERRIDES, *size, *data, *keys)
                slowness = SLOWNESS * rows["none"][-1][0] if contender.startswith("slow") else 0.0
                rows[contender].append(_measure(folder / contender, overrides, steps, slowness))
    results = [_row(name, rows[name], rows["none"]) for name in contenders]
    headings = ("contender", "step", "of which waiting", "ratio", "saved")
    table = Table(*headings, title=machine.about()["processor"])
    for row in results:
        table.add_row(
            row["contender"], f"{row['step_seconds'] * 1000:.0f} ms",
            f"{row['stall_seconds'] * 1000:.0f} ms", f"{row['ratio']:.2f}",
            f"{row['saved']:.0%}",
        )  # fmt: skip
    wide_console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def _measure(folder: Path, overrides: Sequence[str], steps: int, slowness: float) -> Means:
    """Train once; return the means.

    Args:
        folder: an empty folder for the run.
        overrides: the command line.
        steps: number of steps.
        slowness: seconds that the disk needs for the checkpoint of one step; 0 = as it is.

    Raises:
        TrainingError: the run failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    places = (
        f"run.dir={folder}/run", f"checkpoint.tiers.local.path={folder}/disks",
        "checkpoint.tiers.local.every_steps=1", "launch.ranks_per_node=1",
    )  # fmt: skip
    folder.mkdir()
    run = ForkedRun(partial(_train, slowness), (*overrides, *places), folder / "log")
    try:
        run.wait_for_end()
    finally:
        run.end()
    if run.exit_code():
        raise TrainingError(f"a run failed:\n{(folder / 'log').read_text()[-2000:]}")
    lines = map(json.loads, (folder / "run" / METRICS_FILE).read_text().splitlines())
    counted = [line for line in lines if WARM_UP < line["step"] < steps]
    shutil.rmtree(folder)
    return (
        statistics.fmean(line["step_seconds"] for line in counted),
        statistics.fmean(line["checkpoint_stall_seconds"] for line in counted),
        1 - statistics.fmean(line["checkpoints_skipped"] for line in counted),
    )


def _train(slowness: float, overrides: Sequence[str]) -> int:
    """Train in this process and its forks, in which a rank's file takes some seconds to write."""
    write = RankFile.write

    def slow(self: RankFile, buffer: torch.Tensor, size: int) -> None:
        end = time.monotonic() + slowness * size / self._size
        write(self, buffer, size)
        time.sleep(max(0.0, end - time.monotonic()))

    if slowness:
        RankFile.write = slow  # type: ignore[method-assign]
    return train(overrides)


def _row(name: str, found: Sequence[Means], none: Sequence[Means]) -> dict[str, Any]:
    seconds, stalls, saved = zip(*found, strict=True)
    ratios = [own[0] / base[0] for own, base in zip(found, none, strict=True)]
    return {
        "contender": name,
        "step_seconds": statistics.median(seconds),
        "stall_seconds": statistics.median(stalls),
        "ratio": statistics.median(ratios),
        "saved": statistics.median(saved),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
