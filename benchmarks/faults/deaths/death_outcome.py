"""What a series of deaths has shown: seconds, problems, and what the ranks use."""

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
from rich.table import Table

from benchmarks.faults.deaths.disturbed_run import RANKS, DisturbedRun
from frontier_llm.cli.console import wide_console

SECOND_KILLS = 0.15
"""Share of the kills that are followed by a second one."""


@dataclass
class Outcome:
    """What a series of kills has shown."""

    seconds: list[float] = field(default_factory=list)
    """From the last kill to the end of the next step."""
    kills: int = 0
    """Number of processes killed."""
    problems: list[str] = field(default_factory=list)
    """What was lost or wrong."""
    resources: dict[int, list[tuple[int, int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Threads, descriptors and MiB of a rank, by the number of deaths that it has survived."""
    steps: int = 0
    """Number of steps compared."""


def kill_and_wait(
    run: DisturbedRun, kill: Callable[[], set[int]], draw: random.Random, outcome: Outcome
) -> bool:
    """Kill after a random time, and wait for the next step; return whether it was done.

    The first kill comes after 0.2 to 0.8 s, and some are followed by a second one, of a random
    rank, within 0.8 s.

    Args:
        run: the run.
        kill: kills processes, and returns their ids.
        draw: source of the moments.
        outcome: gets the seconds from the last kill to the first step after the ranks of the
            killed processes have been given to others, and what the ranks use.
    """
    time.sleep(draw.uniform(0.2, 0.8))
    sample_resources(run, outcome)
    killed, start = kill(), time.monotonic()
    if draw.random() < SECOND_KILLS:
        time.sleep(draw.uniform(0.0, 0.8))
        if second := run.kill([draw.randrange(RANKS)]):
            killed, start = killed | second, time.monotonic()
    outcome.kills += len(killed)
    run.wait_until_replaced(killed)
    step = run.steps
    if run.wait_beyond(step):
        outcome.seconds.append(time.monotonic() - start)
        return True
    log = run.log.read_text()[-5000:]
    outcome.problems.append(f"{run.run.name}: no step after the kill of step {step}:\n{log}")
    return False


def sample_resources(run: DisturbedRun, outcome: Outcome) -> None:
    """Record what every rank uses."""
    holders = run.holders()
    newest = max(generation for _, generation in holders.values())
    for pid, generation in holders.values():
        try:
            process = psutil.Process(pid)
            used = process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20
        except psutil.Error:
            continue
        outcome.resources[newest - generation].append(used)


def usage(outcome: Outcome) -> list[tuple[str, int, float, float, float]]:
    """Return (deaths survived, samples, median threads, descriptors, MiB) by groups of deaths."""
    rows = []
    for low, high in ((0, 1), (1, 3), (3, 8), (8, 20), (20, 10**9)):
        samples = [s for deaths, many in outcome.resources.items() if low <= deaths < high
                   for s in many]  # fmt: skip
        if samples:
            name = f"{low}" if high == low + 1 else f"{low} or more" if high > 99 else (
                f"{low} to {high - 1}")  # fmt: skip
            middle = [median(column) for column in zip(*samples, strict=True)]
            rows.append((name, len(samples), middle[0], middle[1], middle[2]))
    return rows


def to_table(outcome: Outcome) -> Table:
    """Return the figures as a table."""
    table = Table("figure", "value", title="Deaths of ranks")
    seconds = sorted(outcome.seconds) or [0.0]
    table.add_row("processes killed", str(outcome.kills))
    table.add_row("steps compared", str(outcome.steps))
    table.add_row("problems", str(len(outcome.problems)))
    table.add_row("kill to next step, median", f"{median(seconds):.2f} s")
    table.add_row("kill to next step, worst", f"{seconds[-1]:.2f} s")
    for name, count, threads, descriptors, memory in usage(outcome):
        text = f"{threads:.0f} threads, {descriptors:.0f} descriptors, {memory:.0f} MiB"
        table.add_row(f"deaths survived: {name}", f"{text} (median of {count})")
    return table


def report(outcome: Outcome, options: Any) -> int:
    """Print the figures and problems, and write them to `options.json`; return the exit code."""
    console = wide_console()
    console.print(to_table(outcome))
    for problem in outcome.problems:
        console.print(problem, highlight=False, markup=False)
    if options.json:
        given = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps(to_dict(outcome, **given), indent=1))
    return 1 if outcome.problems else 0


def to_dict(outcome: Outcome, **options: Any) -> dict[str, Any]:
    """Return the figures and the options of the command line as plain JSON."""
    return {
        "options": options,
        "cores": os.cpu_count(),
        "processes_killed": outcome.kills,
        "steps_compared": outcome.steps,
        "problems": outcome.problems,
        "seconds": outcome.seconds,
        "usage": usage(outcome),
    }
