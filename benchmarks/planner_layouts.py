"""Compare the planner with measured layouts on CPU ranks, after a calibration of this machine.

    python -m benchmarks.planner_layouts                     # all layouts, about five minutes
    python -m benchmarks.planner_layouts --layouts zero3 1f1b
    python -m benchmarks.planner_layouts --quick             # smoke test
    python -m benchmarks.planner_layouts --json benchmarks/results/planner_layouts_<cpu>_<date>.json

`frontier-llm calibrate` writes a cluster file into a temporary folder. The planner predicts each
layout on this cluster before the layout runs. Then two forked ranks with one thread each train it:
first two steps in which the memory of all tensors is followed (HeldBytes), from the first weight
on, then timed steps with a barrier before each. Layouts take turns, `--rounds` times.

    planned, measured     median duration of a step on the slower rank, over all rounds
    planned, measured     peak memory of tensors on the fuller rank; without the interpreter and the
                          slack of the allocator, which are no tensors
    error                 planned divided by measured, minus 1

The last line has the means of the absolute errors. Other programs must not run: before each turn
the benchmark waits up to `--patience` seconds for that, and steps during which others used more
than a tenth of a core do not count. A disturbed calibration is repeated. If all steps of a layout
were disturbed, all of them count, and the table says so.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.table import Table

from benchmarks.bench_options import bench_parser, parse_bench
from benchmarks.layouts.layout_case import LAYOUTS, RANKS, Sizes
from benchmarks.layouts.layout_rank import RankFigures, run_layout
from benchmarks.layouts.layout_results import Row, make_row
from benchmarks.testbed import machine
from benchmarks.testbed.foreign_load import busy_seconds, is_disturbed, wait_until_quiet
from benchmarks.testbed.forked import on_ranks
from frontier_llm.cli import calibrate
from frontier_llm.cli.console import plain_table, wide_console
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.config import RunConfig

CLUSTER = "this_machine"
"""Name of the cluster file that the calibration writes."""
ATTEMPTS = 3
"""Most calibrations. The last one counts, even if other programs have computed meanwhile."""
QUICK = {"layers": 4, "hidden": 64, "heads": 2, "vocabulary": 256, "sequence": 32, "steps": 1,
         "rounds": 1, "patience": 0}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure the layouts, print the table, write the JSON; return the exit code."""
    parser = bench_parser(__doc__, rounds=2, quick="tiny layers, one step")
    add = parser.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME",
        help="names of layouts (default all): " + ", ".join(LAYOUTS))  # fmt: skip
    add("--layers", type=at_least(2), default=6, help="layers of the model (default 6)")
    add("--hidden", type=at_least(1), default=384, help="width of the model (default 384)")
    add("--heads", type=at_least(1), default=6, help="attention heads (default 6)")
    add("--vocabulary", type=at_least(1), default=4096, help="tokens known (default 4096)")
    add("--sequence", type=at_least(1), default=256, help="tokens per sample (default 256)")
    add("--batch", type=at_least(8), default=8, help="samples per step (default 8)")
    add("--steps", type=at_least(1), default=5, help="timed steps per turn (default 5)")
    add("--patience", type=at_least(0), default=20, metavar="SECONDS",
        help="wait so long for other programs before each turn (default 20)")  # fmt: skip
    options = parse_bench(parser, arguments, QUICK)
    sizes = Sizes(options.layers, options.hidden, options.heads, options.vocabulary,
                  options.sequence, options.batch)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench_cluster_") as name:
        configs = _calibrated(Path(name), sizes, options.layouts, options.patience)
    turns: dict[str, list[list[RankFigures]]] = {layout: [] for layout in configs}
    for _ in range(options.rounds):
        for layout, config in configs.items():
            wait_until_quiet(options.patience)
            turns[layout].append(on_ranks(run_layout, RANKS, config, options.steps))
    rows = [make_row(layout, config, turns[layout]) for layout, config in configs.items()]
    wide_console().print(_table(rows))
    if options.json:
        first = next(iter(configs.values()))
        facts = {
            **machine.about(),
            "sizes": asdict(sizes),
            "rounds": options.rounds,
            "steps": options.steps,
            "cluster": first.cluster.model_dump(mode="json"),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


def _calibrated(
    folder: Path, sizes: Sizes, layouts: Sequence[str], patience: float
) -> dict[str, RunConfig]:
    """Calibrate this machine into a folder; return the configurations of layouts on it."""
    before = os.environ.get(CONF_DIR_VARIABLE)
    os.environ[CONF_DIR_VARIABLE] = str(folder)
    try:
        _calibrate(patience)
        return {layout: sizes.config(layout, [f"cluster={CLUSTER}"]) for layout in layouts}
    finally:
        del os.environ[CONF_DIR_VARIABLE]
        if before is not None:
            os.environ[CONF_DIR_VARIABLE] = before


def _calibrate(patience: float) -> None:
    """Write the cluster file; repeat this a few times if other programs have computed meanwhile."""
    for attempt in range(ATTEMPTS):
        wait_until_quiet(patience)
        busy, own, start = busy_seconds(), _own_seconds(), time.monotonic()
        calibrate.main(["--ranks", str(RANKS), "--write", CLUSTER])
        seconds = time.monotonic() - start
        disturbed = is_disturbed(busy_seconds() - busy, _own_seconds() - own, seconds)
        if not disturbed or not patience:
            return
        print(f"other programs computed during calibration {attempt + 1}", file=sys.stderr)


def _own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _table(rows: Sequence[Row]) -> Table:
    table = plain_table(f"{RANKS} ranks on {os.cpu_count()} cores", [])
    for column in ("layout", "planned, ms", "measured, ms", "error",
                   "planned, MiB", "measured, MiB", "error", "steps"):  # fmt: skip
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(
            row.layout,
            f"{row.planned_seconds * 1e3:.0f}",
            f"{row.seconds * 1e3:.0f}",
            f"{row.time_error:+.1%}",
            f"{row.planned_bytes / 2**20:.1f}",
            f"{row.peak_bytes / 2**20:.1f}",
            f"{row.memory_error:+.1%}",
            "disturbed" if row.is_disturbed else str(row.counted_steps),
        )
    means = [
        f"{statistics.mean(abs(error) for error in errors):.1%}"
        for errors in (
            [row.time_error for row in rows],
            [row.memory_error for row in rows],
        )
    ]
    table.add_row("mean of absolute errors", "", "", means[0], "", "", means[1], "")
    return table


if __name__ == "__main__":
    sys.exit(run_command(main))
