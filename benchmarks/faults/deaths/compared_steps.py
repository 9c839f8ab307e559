"""Compares each step of a disturbed run with the same step of a run that is not disturbed."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from benchmarks.faults.deaths.death_outcome import Outcome
from benchmarks.faults.deaths.disturbed_run import LocalRun


def compare(
    folder: Path, overrides: Sequence[str], disturbed: Sequence[Path], outcome: Outcome
) -> None:
    """Train undisturbed as far as the disturbed runs came, and compare every step of them.

    Args:
        folder: parent of the run directory of the undisturbed run.
        overrides: configuration of the undisturbed run.
        disturbed: run directories of the disturbed runs; those without a step are left out.
        outcome: gets the number of steps, and what is wrong.
    """
    disturbed = [run for run in disturbed if (run / "metrics.jsonl").exists()]
    if not disturbed:
        return
    last = max(len(steps_of(run)[0]) for run in disturbed)
    reference = LocalRun(folder / "reference", overrides)
    with Progress() as progress:
        bar = progress.add_task("reference", total=last)
        while reference.exit_code() is None and reference.steps < last:
            progress.update(bar, completed=reference.steps)
            time.sleep(0.2)
    reference.stop()
    for run in disturbed:
        _compare_run(run, reference.run, outcome)


def _compare_run(disturbed: Path, reference: Path, outcome: Outcome) -> None:
    found, double = steps_of(disturbed)
    problems = [f"step {step} has two lines in metrics.jsonl" for step in double]
    if sorted(found) != list(range(1, len(found) + 1)):
        problems.append("steps are missing in metrics.jsonl")
    expected, _ = steps_of(reference)
    for step, values in found.items():
        if values[:3] != expected[step][:3] or values[3] not in (expected[step][3], None):
            problems.append(f"step {step}: {values} instead of {expected[step]}")
    samples, double = samples_of(disturbed)
    problems += [f"step {step} has two lines in ledger.jsonl" for step in double]
    expected_samples, _ = samples_of(reference)
    for step in found:
        if samples.get(step) != expected_samples[step]:
            problems.append(f"step {step}: samples {samples.get(step)}")
    outcome.steps += len(found)
    outcome.problems += [f"{disturbed.name}: {problem}" for problem in problems]


def steps_of(run: Path) -> tuple[dict[int, tuple[float, float, int, float | None]], list[int]]:
    """Return loss, norm, samples and validation loss by step, and the steps with two lines."""
    found, double = {}, []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        double += [row["step"]] if row["step"] in found else []
        values = row["loss"], row["grad_norm"], row["samples"], row.get("validation_loss")
        found[row["step"]] = values
    return found, double


def samples_of(run: Path) -> tuple[dict[int, tuple[int, int, str]], list[int]]:
    """Return first sample, samples and digest by step, and the steps with two lines."""
    found: dict[int, tuple[int, int, str]] = {}
    double = []
    for line in (run / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry.get("event") == "resume":  # these steps are done again
            found = {step: read for step, read in found.items() if step <= entry["step"]}
        if "digest" in entry:
            double += [entry["step"]] if entry["step"] in found else []
            found[entry["step"]] = entry["first_sample"], entry["samples"], entry["digest"]
    return found, double
