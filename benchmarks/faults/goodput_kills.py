"""Compare the effective training time that is predicted with that of a run of real kills.

    python -m benchmarks.faults.goodput_kills                # 50 kills, 15 s apart: 14 minutes

A run with recovery.enabled=true is killed at exponential times, whatever it is doing, as the
simulator assumes. Before, twenty kills give the mean seconds of a recovery, and the steps without
kills give the seconds of a step. With these numbers and the mean time between kills, the simulator
predicts the share of the time in which the run makes new steps. The measured share is the sum of
the seconds of all new steps (metrics.jsonl), over the time of the run.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from rich.progress import track
from rich.table import Table

from benchmarks.bench_options import bench_parser
from benchmarks.faults.deaths.disturbed_run import OVERRIDES, RANKS, LocalRun
from benchmarks.faults.kill_loop import write_corpus
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.errors import TrainingError
from frontier_llm.planner.effective_time import Recovery, simulate
from frontier_llm.telemetry.history import History

CALIBRATION_KILLS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, measure and predict; return the exit code."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=at_least(1), default=50, help="kills that are measured (default 50)")
    add("--mtbf", type=float, default=15.0, help="mean seconds between kills (default 15)")
    add("--seed", type=int, default=1, help="seed of the moments and targets (default 1)")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="goodput_kills_") as name:
        folder = Path(name)
        data = (f"data.path={write_corpus(folder)}", f"data.directory={folder}/corpora")
        keys = (*OVERRIDES, *data, "recovery.enabled=true", "checkpoint.every_steps=20",
                "trainer.evaluate_every_steps=null", "trainer.steps=1000000")  # fmt: skip
        run = LocalRun(folder / "run", keys)
        try:
            wait(run, 20)
            recovery, step = calibrate(run, draw)
            gaps = [draw.expovariate(1 / options.mtbf) for _ in range(options.kills)]
            measured, mtbf = measure(run, gaps, draw)
        finally:
            run.kill_all()
    in_place = Recovery("in place", stall=0.0, seconds=recovery, keeps_steps=True)
    predicted = simulate(in_place, mtbf, step, 10**6).effective
    table = Table("figure", "value")
    table.add_row("kills", str(options.kills))
    table.add_row("mean time between kills", f"{mtbf:.1f} s")
    table.add_row("seconds of a recovery, without the step in flight", f"{recovery:.2f} s")
    table.add_row("seconds of a step", f"{step:.3f} s")
    table.add_row("effective time, predicted", f"{predicted:.3f}")
    table.add_row("effective time, measured", f"{measured:.3f}")
    table.add_row("difference", f"{100 * (measured - predicted):+.1f} points")
    wide_console().print(table)
    if options.json:
        result = {
            "kills": options.kills, "mtbf": mtbf, "recovery": recovery, "step": step,
            "predicted": predicted, "measured": measured, "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1))
    return 0


def calibrate(run: LocalRun, draw: random.Random) -> tuple[float, float]:
    """Return the seconds of a recovery and of a step."""
    seconds = []
    for _ in range(CALIBRATION_KILLS):
        time.sleep(draw.uniform(1.0, 3.0))
        step = run.steps
        run.kill([draw.randrange(RANKS)])
        start = time.monotonic()
        wait(run, step)
        seconds.append(time.monotonic() - start)
    step_seconds = median(value for _, value in History.read(run.run).points("step_seconds"))
    # the interrupted step is half done on average, and is done again as a whole
    return mean(seconds) - step_seconds, step_seconds


def measure(run: LocalRun, gaps: Sequence[float], draw: random.Random) -> tuple[float, float]:
    """Kill a rank after each gap; return the effective share and the mean gap."""
    start, first = time.monotonic(), run.steps
    due = start
    for gap in track(gaps, "kills"):
        due += gap
        time.sleep(max(0.0, due - time.monotonic()))
        run.kill([draw.randrange(RANKS)])
    wait(run, run.steps)
    elapsed = time.monotonic() - start
    points = History.read(run.run).points("step_seconds")
    seconds = sum(value for step, value in points if step > first)
    return seconds / elapsed, sum(gaps) / len(gaps)


def wait(run: LocalRun, step: int) -> None:
    """Wait until a later step is done.

    Raises:
        TrainingError: the run has ended or hangs.
    """
    if not run.wait_beyond(step):
        raise TrainingError(f"no step after step {step}:\n{run.log.read_text()[-3000:]}")


if __name__ == "__main__":
    sys.exit(run_command(main))
