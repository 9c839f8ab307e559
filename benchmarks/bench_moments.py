"""Measure what resumes from checkpoints with rounded moments do to the loss.

    python -m benchmarks.bench_moments                   # 3 seeds, 300 steps each, 10 minutes
    python -m benchmarks.bench_moments --quick           # a smoke test
    python -m benchmarks.bench_moments --rounds 5 --json FILE

A small GPT trains on two ranks. After a third and two thirds of the steps the run ends as if it had
been killed, and resumes from the checkpoint on the node's disk (`checkpoint.moments`). The formats
take turns, each with the same seeds. The table shows the bytes of a node-local checkpoint, and how
far the losses are from those of a run that was never interrupted: the mean and the largest
difference after the first resume, and the difference of the mean over the last sixth of the run.
The mean difference of two seeds shows what is small.
"""

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

from rich.table import Table

from benchmarks.bench_options import bench_parser
from benchmarks.faults.kill_loop import OVERRIDES, train, write_corpus
from benchmarks.faults.kills.forked_run import ForkedRun
from benchmarks.testbed import machine
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import run_command
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.jsonl import METRICS_FILE

FORMATS = ("fp32", "bf16", "int8")
SIZE = ("model.hidden=64", "data.sequence_length=64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = bench_parser(
        __doc__, rounds=3, folder_for="folder of all checkpoints", quick="30 steps of a tiny model"
    )
    options = parser.parse_args(arguments)
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)  # once, before the forks
    steps = 30 if options.quick else 300
    seeds = range(1, 2 + (0 if options.quick else options.rounds))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in FORMATS}
    references: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="bench_moments_", dir=options.folder) as name:
        folder = Path(name)
        data = (f"data.path={write_corpus(folder)}", f"data.directory={folder}/corpora")
        common = (*OVERRIDES, *(() if options.quick else SIZE), *data)
        common += (f"optimizer.decay_steps={steps}", "checkpoint.every_steps=1000")
        for seed in seeds:
            keys = (*common, f"trainer.seed={seed}")
            references.append(_train(folder / "run", keys, (steps,), "fp32")[0])
            if seed == seeds[-1] and len(seeds) > 1:
                break  # only for the difference of two seeds
            for moments in FORMATS:
                ends = (steps // 3 + 1, 2 * steps // 3 + 1, steps)
                losses, size = _train(folder / "run", keys, ends, moments)
                found[moments].append(_compare(losses, references[-1], steps) | {"bytes": size})
    spread = [_compare(a, b, steps)["mean"] for a, b in pairwise(references)]
    results = [_row(name, found[name]) for name in FORMATS]
    table = Table("format", "bytes on a node's disk", "mean difference", "largest",
                  "last sixth", title=machine.about()["processor"])  # fmt: skip
    for row in results:
        low, high = row["mean_range"]
        table.add_row(
            row["format"], f"{row['bytes'] / 1e6:.2f} MB",
            f"{row['mean']:.5f} ({low:.5f} to {high:.5f})", f"{row['largest']:.5f}",
            f"{row['end']:+.5f}",
        )  # fmt: skip
    wide_console().print(table)
    if spread:
        wide_console().print(f"mean difference of two seeds: {statistics.median(spread):.5f}")
    if options.json:
        content = {"formats": results, "two_seeds": spread, "steps": steps}
        options.json.write_text(json.dumps(content, indent=1))
    return 0


def _train(
    run: Path, keys: Sequence[str], ends: Sequence[int], moments: str
) -> tuple[list[float], int]:
    """Train in several parts; return the loss of each step, and the bytes of a local checkpoint.

    Args:
        run: an empty folder for the run.
        keys: the command line.
        ends: last step of each part. All but the last part lose their last step, as a killed run
            does, and the next part resumes from the step before.
        moments: format of the moments on the nodes' disks.
    """
    shutil.rmtree(run.parent / "place", ignore_errors=True)
    place = run.parent / "place"
    place.mkdir()
    more = [f"run.dir={place}/run"]
    if len(ends) > 1:
        more += [f"checkpoint.tiers.local.path={place}/disks", f"checkpoint.moments={moments}"]
        more += [f"checkpoint.tiers.local.every_steps={ends[0] - 1}"]
    size = 0
    for end in ends:
        one = ForkedRun(train, (*keys, *more, f"trainer.steps={end}"), run.parent / "log")
        try:
            one.wait_for_end()
        finally:
            one.end()
        if one.exit_code():
            raise TrainingError(f"a run failed:\n{(run.parent / 'log').read_text()[-2000:]}")
        if end != ends[-1]:
            shutil.rmtree(place / "run" / "checkpoints" / f"step_{end:08d}")
            (local,) = place.glob(f"disks/*/*/step_{end - 1:08d}")
            size = sum(path.stat().st_size for path in local.glob("*.safetensors"))
    lines = map(json.loads, (place / "run" / METRICS_FILE).read_text().splitlines())
    return [line["loss"] for line in lines], size


def _compare(losses: Sequence[float], wanted: Sequence[float], steps: int) -> dict[str, float]:
    """Return how far losses are from others after the first resume."""
    first, last = steps // 3, steps - steps // 6
    differences = [abs(a - b) for a, b in zip(losses[first:], wanted[first:], strict=True)]
    end = statistics.fmean(losses[last:]) - statistics.fmean(wanted[last:])
    return {"mean": statistics.fmean(differences), "largest": max(differences), "end": end}


def _row(name: str, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    means = [one["mean"] for one in found]
    return {
        "format": name,
        "bytes": found[0]["bytes"],
        "mean": statistics.median(means),
        "mean_range": [min(means), max(means)],
        "largest": max(one["largest"] for one in found),
        "end": statistics.median(one["end"] for one in found),
        "end_range": [min(one["end"] for one in found), max(one["end"] for one in found)],
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
