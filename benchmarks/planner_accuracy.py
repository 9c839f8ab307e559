"""Compare the planner with published training speeds: `python -m benchmarks.planner_accuracy`.

Predicts every row of the tables in benchmarks/published, twice: with the constants of conf/cluster
and conf/engine, which were fitted to all tables (in sample), and with constants that were fitted to
the other tables (left out). Only the second error says how well the planner predicts runs that it
never saw. If a table has several layouts of one job, it also compares the layout that the planner
would choose with the fastest measured one. `--fit` fits all constants again and writes
benchmarks/results/planner.json.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import correlation, fmean
from typing import Any, NamedTuple

from benchmarks.harness import print_table
from frontier_lab.commands.plan_foreign import ERRORS
from frontier_lab.commands.plan_measured import read_table
from frontier_lab.planning.measured import (
    LARGEST,
    Errors,
    MeasuredRun,
    Prediction,
    damped,
    errors,
    fit,
    predict,
    with_constants,
)
from frontier_llm.cli.options import run_command, tool_parser
from frontier_llm.planner.candidate import Candidate

FOLDER = Path(__file__).with_name("published")
"""The tables of measured runs. The first lines of each file name its source."""
RESULTS = Path(__file__).parent / "results" / "planner.json"
DEVICES = {"A800": "A100", "A100": "A100", "H100": "H100", "MI250X": "MI250X"}
"""Words in the names of devices, and the devices whose constants they share."""
ENGINES = "engines"
PRODUCT_RATIO = {"H100": 0.803 / 0.869, "MI250X": 0.66}
"""`product_share` of a device that no table of the fit contains, relative to the A100. H100: the
fastest products that a search over shapes found, 794.5 of 989 and 271.2 of 312 TFLOP/s (S. Bekman,
Machine Learning Engineering, maximum achievable matmul FLOPS). MI250X: MPT models train at 80% of
the speed of an A100-40GB and at 73% of that of an A100-80GB per MI250, whose peak is 362 TFLOP/s
(MosaicML, Training LLMs with AMD MI250 GPUs, 2023: ROCm 5.4): 66% relative to the peaks."""
ATTENTION_RATIO = {"H100": 0.6, "MI250X": 0.63}
"""`attention_share` of such a device, relative to the A100. FlashAttention-2 reaches 35% of the
peak of an H100 (arXiv:2407.08608) and 50% to 73% of that of an A100 (arXiv:2307.08691). On a GCD of
an MI250X its forward pass reaches 25% of the peak (ROCm/flash-attention, issue 44: 3.62 ms for
1,024 heads of 576 x 576 scores and dimension 128), where large products reach 50%, not 77%."""
START = {
    "A100.product_share": 0.8,
    "A100.attention_share": 0.55,
    "A100.memory_share": 0.8,
    "H100.product_share": 0.74,
    "H100.attention_share": 0.33,
    "engines.elementwise_factor": 1.5,
    "engines.layer_us": 1200.0,
    "engines.micro_batch_us": 1500.0,
    "deepspeed.tensor_wait_us": 50.0,
    "internevo.refresh_owner_us": 1000.0,
}
"""Starting values: 92% of the fastest products that were found, the cited speeds of attention, the
share of the bandwidth that copies reach, and orders of magnitude for the engines."""
PROGRAMS = ("megatron_2021", "megatron_2022", "fsdp", "internevo", "deepspeed")
"""Programs with measured runs, by name of their engine file."""
RATIOS = ("product_ratio", "elementwise_factor")
"""Constants of a program relative to those that all programs share."""
START_RATIOS = {
    f"{name}.{ratio}": 0.7 if ratio == "elementwise_factor" and "megatron" in name else 1.0
    for name in PROGRAMS
    for ratio in RATIOS
}
"""Starting values of these ratios. Megatron-LM has kernels that fuse biases, activations, dropout,
norms and softmax (arXiv:2104.04473, section 4.2), so it starts near the bytes of fused kernels."""
START_AMD = {"MI250X.product_share": 0.5}
EVERY = {"vtrain_single_node": 24, "llm_foundry_a100_40gb": 3}
"""Every how many rows of a table are used in a fit; all rows are predicted."""
Constants = Mapping[str, float]
CORRECTED_JOBS = 20
"""Smallest number of jobs in a table for which the errors of shapes are removed, too."""
LEAST_RANKED = 4
"""Smallest number of layouts of a job whose order is compared."""


class Table(NamedTuple):
    """A table of measured runs."""

    title: str
    """Title for the documentation."""
    device: str
    """Device on which all its runs were measured."""
    fits: bool = True
    """Whether constants are fitted to it."""
    note: str = ""
    """Note for the documentation."""


TABLES = {
    "vtrain_single_node": Table("Megatron-LM (vTrain)", "A100"),
    "llm_foundry_a100_40gb": Table("llm-foundry on A100-40GB", "A100"),
    "llm_foundry_h100_under_7b": Table("llm-foundry on H100, models under 7B", "H100"),
    "megatron_sc21": Table("Megatron-LM on A100 (SC'21)", "A100"),
    "amsp": Table("AMSP and others", "A100"),
    "frontier": Table("Frontier (MI250X)", "MI250X"),
    "lumi": Table("LUMI (MI250X)", "MI250X"),
    "megatron_2022": Table("Megatron-LM of 2022", "A100"),
    "internevo": Table("InternEvo, 7B", "A100"),
    "bloom_prequel": Table("BLOOM's prequel", "A100"),
    "megatron_sc21_unused": Table(
        "Megatron-LM on A100 (SC'21), other rows", "A100", fits=False, note="never fitted"
    ),
    "amsp_zero3": Table(
        "ZeRO-3 and ZeRO++ on 1024 A800", "A100", fits=False, note="size of messages fitted to it"
    ),
}
"""The tables by the name of their file."""


class Choices(NamedTuple):
    """How well the planner chooses among the measured layouts of each job."""

    jobs: int
    """Jobs with at least two measured layouts."""
    fastest: int
    """Jobs in which the layout with the fastest prediction is the fastest measured one."""
    regret: float
    """By how much the layout with the fastest prediction is slower than the fastest measured one,
    as a share of the seconds of the latter; mean over all jobs."""
    largest_regret: float
    ranked: int
    """Jobs with at least LEAST_RANKED layouts."""
    rank_correlation: float | None
    """Spearman's rank correlation of predicted and measured seconds, mean over these jobs; None if
    there are none."""


def choices(predictions: Sequence[Prediction], *, corrects_shapes: bool = False) -> Choices | None:
    """Compare the choices of the planner with those of a measurement; None = no choice is left.

    A table may hold several layouts of one job: runs with the same model, program, ranks, sequence
    length and global batch, but different tensor, pipeline and data sizes, micro-batches,
    recomputation or sharding factors. With `corrects_shapes` each prediction is divided by the mean
    ratio of predicted and measured seconds of all runs with the same shapes of matrix products. The
    result then tells what the speed of shapes does not explain.
    """
    ratios = _shape_ratios(predictions) if corrects_shapes else {}
    jobs: defaultdict[tuple[object, ...], list[_Layout]] = defaultdict(list)
    for one in predictions:
        predicted = one.estimate.time.seconds / ratios.get(_shape(one), 1.0)
        jobs[_job(one)].append((predicted, _measured_seconds(one)))
    chosen = [job for job in jobs.values() if len(job) > 1]
    if not chosen:
        return None
    regrets = [_regret(job) for job in chosen]
    ranked = [_rank_correlation(job) for job in chosen if len(job) >= LEAST_RANKED]
    mean = fmean(ranked) if ranked else None
    fastest = regrets.count(0.0)
    return Choices(len(chosen), fastest, fmean(regrets), max(regrets), len(ranked), mean)


_Layout = tuple[float, float]
"""Predicted and measured seconds of a step with one layout of a job."""


def _job(prediction: Prediction) -> tuple[object, ...]:
    """Return what all layouts of a job have in common."""
    candidate = prediction.estimate.candidate
    config = candidate.config
    return (
        config.model.model_dump_json(),
        config.planner.engine.name,
        config.cluster.name,
        candidate.layout.precision,
        candidate.grid.size,
        config.data.sequence_length,
        config.data.global_batch,
    )


def _shape(prediction: Prediction) -> tuple[int, ...]:
    """Return what determines the shapes of a layer's matrix products on a rank."""
    candidate = prediction.estimate.candidate
    config, layout = candidate.config, candidate.layout
    return config.model.hidden, layout.lengths.total, candidate.grid.tensor, layout.micro_batch


def _shape_ratios(predictions: Sequence[Prediction]) -> dict[tuple[int, ...], float]:
    """Return the mean ratio of predicted and measured seconds by shape."""
    ratios: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    for one in predictions:
        ratios[_shape(one)].append(one.estimate.time.seconds / _measured_seconds(one))
    return {shape: fmean(some) for shape, some in ratios.items()}


def _measured_seconds(prediction: Prediction) -> float:
    """Return the seconds of a step that follow from the measured quantity."""
    run = prediction.run
    if run.quantity == "measured_step_seconds":
        return run.measured
    return prediction.estimate.time.seconds * prediction.predicted / run.measured


def _regret(job: Sequence[_Layout]) -> float:
    _, chosen = min(job, key=lambda layout: layout[0])
    return chosen / min(measured for _, measured in job) - 1


def _rank_correlation(job: Sequence[_Layout]) -> float:
    predicted, measured = zip(*job, strict=True)
    return correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of each table; fit first with `--fit`."""
    parser = tool_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, minutes")
    options = parser.parse_args(arguments)
    if options.fit:
        RESULTS.write_text(json.dumps(fitted(), indent=1) + "\n")
        ERRORS.write_text(json.dumps(engine_errors(), indent=1) + "\n")
    rows = (
        [name, str(count), *(f"{found.mean:.1%}, {found.worst:.1%}" for found in kinds)]
        for name, count, *kinds in error_rows()
    )
    print_table("Mean and largest error", ["table", "runs", "left out", "in sample"], rows)
    columns = ["table", "constants", "fastest chosen", "mean regret", "largest", "order"]
    print_table("Choice among the measured layouts of a job", columns, choice_rows(), left=2)
    return 0


@cache
def runs(name: str) -> list[MeasuredRun]:
    """Return the runs of a table."""
    return read_table(FOLDER / f"{name}.csv")


@cache
def in_sample(name: str) -> list[Prediction]:
    """Predict a table with the constants of conf/, which were fitted to all tables."""
    return [predict(run) for run in runs(name)]


@cache
def left_out(name: str) -> list[Prediction]:
    """Predict a table with the stored constants that were fitted without the runs' program."""
    return predictions(name, stored()["left_out"])


def predictions(name: str, of_programs: Mapping[str, Constants]) -> list[Prediction]:
    """Predict a table with the constants for each program, named as in `START`."""
    return [
        predict(run, partial(_changed, constants=of_programs[_program(run)])) for run in runs(name)
    ]


def engine_errors() -> dict[str, dict[str, float]]:
    """Return the errors of each program on all of its runs, with constants fitted to the others.

    `most`: nine of ten runs have at most this absolute error.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name in TABLES:
        for prediction in left_out(name):
            found[_program(prediction.run)].append(abs(prediction.error))
    return {
        program: {
            "runs": len(some),
            "mean": round(fmean(some), 4),
            "most": round(sorted(some)[math.ceil(0.9 * len(some)) - 1], 4),
            "largest": round(max(some), 4),
        }
        for program, some in sorted(found.items())
    }


def stored() -> dict[str, Any]:
    """Return the constants of the last fit."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def fitted() -> dict[str, Any]:
    """Fit all constants, to all tables and without each of them."""
    without = {name: _fit(name) for name in PROGRAMS}
    nvidia = {k: v for k, v in stored()["in_sample"].items() if _owner(k) in ("A100", "H100")}
    every = _fit(None, nvidia)
    return {"in_sample": every, "left_out": without}


def _fit(without: str | None, known: Constants | None = None) -> dict[str, float]:
    """Fit the constants to the runs of all programs but one; those that are `known` stay.

    A device or a program of which no run is left gets its constants from the others. The MI250X
    comes last, so that its few runs decide about its own constant only.
    """
    known = dict(known or {})
    used = {name: _part(name, without) for name, table in TABLES.items() if table.fits}
    used = {name: part for name, part in used.items() if part}
    devices = {TABLES[name].device for name in used}
    owners = {ENGINES, *devices, *(_program(run) for part in used.values() for run in part)}
    start = {
        key: value
        for key, value in (START | START_RATIOS).items()
        if _owner(key) in owners and key not in known
    }
    nvidia = {name: part for name, part in used.items() if TABLES[name].device != "MI250X"}
    found = START | START_RATIOS | known | _fit_tables(list(nvidia.values()), start, known)
    if "H100" not in devices:
        found |= _from_a100("H100", found)
    found |= _from_a100("MI250X", found)
    if "MI250X" in devices:
        amd = [part for name, part in used.items() if name not in nvidia]
        found |= _fit_tables(amd, START_AMD, found)
    return _rounded(found)


def _rounded(found: Constants) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def _fit_tables(
    tables: Sequence[Sequence[MeasuredRun]], start: Constants, fixed: Constants
) -> dict[str, float]:
    used = [(run, 1 / len(part)) for part in tables for run in part]

    def residuals(constants: Constants) -> list[float]:
        every = {**fixed, **constants}
        return [
            damped(math.log1p(predict(run, lambda c: _changed(c, every)).error), weight)
            for run, weight in used
        ]

    largest = {key: LARGEST[_name(key)] for key in start if _name(key) in LARGEST}
    return fit(residuals, start, largest)


def _part(name: str, without: str | None) -> list[MeasuredRun]:
    return [run for run in runs(name)[:: EVERY.get(name, 1)] if _program(run) != without]


def _program(run: MeasuredRun) -> str:
    return run.candidates[0].config.planner.engine.name


def _from_a100(device: str, found: Constants) -> dict[str, float]:
    """Return the constants of a device from those of the A100 and from published speeds."""
    return {
        f"{device}.product_share": found["A100.product_share"] * PRODUCT_RATIO[device],
        f"{device}.attention_share": found["A100.attention_share"] * ATTENTION_RATIO[device],
    }


def _changed(candidate: Candidate, constants: Constants) -> Candidate:
    """Return a candidate with the constants of its device and of its program.

    `memory_share` is that of the A100 on every device.
    """
    program = candidate.config.planner.engine.name
    owners = (_device(candidate), ENGINES)
    values = {_name(key): value for key, value in constants.items() if _owner(key) in owners}
    values["memory_share"] = constants["A100.memory_share"]
    of_program = {_name(k): value for k, value in constants.items() if _owner(k) == program}
    for ratio in RATIOS:
        of_program[ratio] = of_program[ratio] * values.get(ratio, 1.0)
    return with_constants(candidate, {**values, **of_program})


def _device(candidate: Candidate) -> str:
    name = candidate.config.cluster.device.name
    return next(device for word, device in DEVICES.items() if word in name)


def _owner(key: str) -> str:
    return key.partition(".")[0]


def _name(key: str) -> str:
    return key.partition(".")[2]


@cache
def table_choices(name: str) -> dict[str, Choices]:
    """Return how well the planner chooses among the layouts of a table, by kind of constants.

    The dictionary is empty if the table has no job with two layouts.
    """
    unseen = left_out(name)
    found = {
        "left out": choices(unseen),
        "in sample": choices(in_sample(name)),
    }
    if found["left out"] and found["left out"].ranked >= CORRECTED_JOBS:
        found["left out, shapes corrected"] = choices(unseen, corrects_shapes=True)
    return {kind: some for kind, some in found.items() if some}


def error_rows() -> Iterator[tuple[str, int, Errors, Errors]]:
    """Yield the name of each table, its number of runs, and its errors left out and in sample."""
    for name in TABLES:
        yield name, len(runs(name)), errors(left_out(name)), errors(in_sample(name))


def choice_rows() -> Iterator[tuple[str, ...]]:
    """Yield the name of a table, the kind of constants, and how well the planner chooses.

    The last three cells are the mean and the largest regret, and the rank correlation.
    """
    for name in TABLES:
        for kind, found in table_choices(name).items():
            order = found.rank_correlation
            ranked = "" if order is None else f"{order:.2f} ({found.ranked} jobs)"
            fastest = f"{found.fastest} of {found.jobs}"
            yield name, kind, fastest, f"{found.regret:.1%}", f"{found.largest_regret:.1%}", ranked


if __name__ == "__main__":
    sys.exit(run_command(main))
