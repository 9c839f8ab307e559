"""Compare the effective training time that is predicted with that of a run of real kills.

    python -m benchmarks.faults.goodput_kills                # 50 kills, 15 s apart: 14 minutes

A run with recovery.enabled=true is killed at exponential times, whatever it is doing, as the
simulator assumes. Before, twenty kills give the mean seconds of a recovery, and the steps without
kills give the seconds of a step. With these numbers and the mean time between kills, the simulator
predicts the share of the time in which the run makes new steps. The measured share is the sum of
the seconds of all new steps (metrics.jsonl), over the time of the run.
"""

import random
import sys
import time
from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.faults.disturbed_runs import OVERRIDES, RANKS, DisturbedRun
from benchmarks.harness import add_numbers, bench_parser, print_table, work_folder, write_json
from benchmarks.testbed.forked_run import corpus_of, import_training
from frontier_lab.option_values import positive
from frontier_lab.planning.effective_time import Recovery, simulate
from frontier_llm.cli.options import run_command
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.history import History

CALIBRATION_KILLS = 20
KEYS = (
    *OVERRIDES, "recovery.enabled=true", "checkpoint.every_steps=20",
    "trainer.evaluate_every_steps=null", "trainer.steps=1000000",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, measure and predict; return the exit code."""
    parser = bench_parser(__doc__)
    numbers = [
        ("kills", 1, 50, "kills that are measured"),
        ("seed", 0, 1, "seed of the moments and targets"),
    ]
    add_numbers(parser, numbers)
    parser.add_argument(
        "--mtbf", type=positive, default=15.0, help="mean seconds between kills (default 15)"
    )
    options = parser.parse_args(arguments)
    import_training()
    draw = random.Random(options.seed)
    gaps = [draw.expovariate(1 / options.mtbf) for _ in range(options.kills)]
    with work_folder("goodput_kills") as folder:
        run = DisturbedRun(folder / "run", (*KEYS, *corpus_of(folder)))
        try:
            wait(run, 20)
            recovery, step = calibrate(run, draw)
            measured = measure(run, gaps, draw)
        finally:
            run.kill_all()
    mtbf = fmean(gaps)
    in_place = Recovery("in place", stall=0.0, seconds=recovery, keeps_steps=True)
    predicted = simulate(in_place, mtbf, step, 10**6).effective
    rows = [
        ("kills", str(options.kills)),
        ("mean time between kills", f"{mtbf:.1f} s"),
        ("seconds of a recovery, without the step in flight", f"{recovery:.2f} s"),
        ("seconds of a step", f"{step:.3f} s"),
        ("effective time, predicted", f"{predicted:.3f}"),
        ("effective time, measured", f"{measured:.3f}"),
        ("difference", f"{100 * (measured - predicted):+.1f} points"),
    ]
    print_table("Effective training time", ["figure", "value"], rows)
    facts = {"recovery": recovery, "step": step, "predicted": predicted, "measured": measured}
    write_json(options, {"kills": options.kills, "mtbf": mtbf, **facts})
    return 0


def calibrate(run: DisturbedRun, draw: random.Random) -> tuple[float, float]:
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
    return fmean(seconds) - step_seconds, step_seconds


def measure(run: DisturbedRun, gaps: Sequence[float], draw: random.Random) -> float:
    """Kill a rank after each gap; return the effective share of the time."""
    start, first = time.monotonic(), run.steps
    due = start
    for gap in gaps:
        due += gap
        time.sleep(max(0.0, due - time.monotonic()))
        run.kill([draw.randrange(RANKS)])
    wait(run, run.steps)
    elapsed = time.monotonic() - start
    points = History.read(run.run).points("step_seconds")
    return sum(value for step, value in points if step > first) / elapsed


def wait(run: DisturbedRun, step: int) -> None:
    """Wait until a later step is done.

    Raises:
        TrainingError: the run has ended or hangs.
    """
    if not run.wait_beyond(step):
        raise TrainingError(f"no step after step {step}:\n{run.log.read_text()[-3000:]}")


if __name__ == "__main__":
    sys.exit(run_command(main))
