"""The tables of docs/planner.md, and those of the runs on Frontier.

The planner predicts them for configurations of `conf/`.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.planner_accuracy import TABLES, choice_rows, error_rows
from docs.generate.blocks import headed
from docs.generate.predictions import BF16_GRADIENTS, predict, ranks_of, with_factors
from frontier_lab.planning.search import Goal, search
from frontier_llm.cli.experiments import composed
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import Estimate
from frontier_llm.units import GIB, format_count

AMSP_PAPER_FACTORS = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}
"""Factors of parameters, gradients and optimizer states in the AMSP paper, by model size."""
AMSP_RANKS = (8, 64, 256, 1024)
PER_NODE = 8
"""GPUs per node of these papers, and GCDs per node of Frontier."""
PUBLISHED_SCHEDULE = (
    "parallel.chunks=1",
    "parallel.schedule=1f1b",
    "parallel.waiting_weights=0",
    "parallel.sequence=false",
)
"""Settings of the pipeline in the paper."""
AUTO = ("parallel.schedule=auto", "parallel.waiting_weights=auto")
SCHEDULES = {
    "175B": {
        "as published": ("experiment=frontier_175b", "parallel.pipeline=16", *PUBLISHED_SCHEDULE),
        "6 chunks on the published stages": (
            "experiment=frontier_175b", "parallel.pipeline=16", "parallel.chunks=6", *AUTO,
        ),
        "`frontier_175b`": ("experiment=frontier_175b",),
    },
    "1T": {
        "as published": ("experiment=frontier_1t", "parallel.pipeline=64", *PUBLISHED_SCHEDULE),
        "2 chunks on the published stages": (
            "experiment=frontier_1t", "parallel.pipeline=64", "parallel.chunks=2", *AUTO,
        ),
        "`frontier_1t`": ("experiment=frontier_1t",),
    },
}  # fmt: skip
"""By model: layouts with their overrides. All rows of a model have the same batch."""
FIRST_RUNS = ("frontier_22b", "frontier_175b", "frontier_1t", "frontier_1t_tp8")
"""Experiments with the models of the paper."""
SEARCH = ("planner.tensor=[4,8]", "planner.micro_batch=[1]", "planner.rows=1")
"""Values to which the search for the fastest layout is restricted."""


@headed("table", "runs", "mean error, left out", "largest", "mean error, in sample", "largest")
def validation() -> Iterator[list[object]]:
    """Yield the errors of all tables."""
    for name, count, *kinds in error_rows():
        note = TABLES[name].note
        cells = [f"{value:.1%}" for found in kinds for value in found]
        yield [_link(name) + (f" ({note})" if note else ""), count, *cells]


@headed("table", "constants", "fastest chosen", "regret, mean", "largest", "rank correlation")
def choices_table() -> Iterator[list[str]]:
    """Yield how well the planner chooses among the measured layouts of a job."""
    return ([_link(name), *cells] for name, *cells in choice_rows() if cells[0] != "in sample")


def _link(name: str) -> str:
    return f"[{TABLES[name].title}](../benchmarks/published/{name}.csv)"


@headed(
    "model", "ranks", "chosen factors", "MFU", "paper's factors", "MFU", "speed-up over MiCS",
    "over ZeRO-3",
)  # fmt: skip
def amsp_table() -> Iterator[list[object]]:
    """Yield the factors that the search chooses, the paper's factors, and the speed-ups."""
    for model, factors in AMSP_PAPER_FACTORS.items():
        for ranks in AMSP_RANKS:
            yield [model.upper(), ranks, *_amsp_cells(model, ranks, factors)]


def _amsp_cells(model: str, ranks: int, paper_factors: tuple[int, int, int]) -> Iterator[str]:
    """Yield the cells of a row of the AMSP table, from the chosen factors on."""
    config = composed(f"experiment=amsp_llama_{model}")
    fixed = {"tensor": (1,), "pipeline": (1,), "micro_batch": (1,), "rows": 1}
    searched = config.changed("planner", **fixed, recompute=(config.recompute,))
    layouts = search(searched, Goal(ranks, config.cluster.ranks_per_node)).best
    if not layouts:
        yield from ["none fits", *[""] * 5]
        return
    best = layouts[0]
    yield best.candidate.factors.in_words
    yield f"{best.mfu or 0:.1%}"
    in_node = min(PER_NODE, ranks)
    mics, zero3 = (in_node, in_node, in_node), (ranks, ranks, ranks)
    yield "/".join(map(str, paper_factors))

    def cell(factors: tuple[int, int, int], text: Callable[[Estimate], str]) -> str:
        """Return a text about other factors; - if these do not divide the ranks."""
        try:
            found = predict(with_factors(config, factors), ranks)
        except ConfigError:
            return "-"
        return "does not fit" if found.refused else text(found)

    yield cell(paper_factors, lambda found: f"{found.mfu or 0:.1%}")
    for factors in (mics, zero3):
        yield cell(factors, lambda found: f"{found.time.seconds / best.time.seconds:.2f}x")


class Curves(NamedTuple):
    """The weak and the strong scaling curve of a layout."""

    experiment: str
    """Its global batch is that of strong scaling, on all numbers of ranks."""
    ranks: tuple[int, ...]
    replica_batch: int
    """Samples per replica and step in weak scaling."""
    published_percent: tuple[int, int]
    """Efficiency of the last run in weak and in strong scaling (arXiv:2312.12705)."""

    def config(self, *overrides: str) -> RunConfig:
        """Return the configuration of the experiment, with gradients of two bytes."""
        return composed(f"experiment={self.experiment}", BF16_GRADIENTS, *overrides)

    def runs(self, config: RunConfig, ranks: int) -> list[Estimate]:
        """Predict the steps in weak and in strong scaling."""
        replicas = ranks // (config.parallel.tensor * config.parallel.pipeline)
        batches = (self.replica_batch * replicas, config.data.global_batch)
        return [predict(config, ranks, global_batch=batch) for batch in batches]

    @property
    def ends(self) -> "Curves":
        """The curves of the first and the last run only."""
        return self._replace(ranks=(self.ranks[0], self.ranks[-1]))


CURVES = {
    "175B": Curves("frontier_175b_scaling", (64, 128, 256, 512, 1024), 640, (100, 89)),
    "1T": Curves("frontier_1t_scaling", (512, 1024, 1536, 3072), 1336, (100, 87)),
}
"""The scaling curves of the paper, by model."""
LAYOUTS = (*CURVES.values(), CURVES["1T"]._replace(experiment="frontier_1t_tp4_scaling"))
"""Curves with jobs: also 1T in the layout of another script."""


class Point(NamedTuple):
    """The runs on one number of ranks; the first value of a pair is that of weak scaling."""

    ranks: int
    runs: list[Estimate]
    efficiencies: list[float]
    """Throughput per GCD relative to that of the first point."""


@headed(
    "model", "GCDs", "samples", "layout", "TP x PP x chunks", "schedule", "recompute", "seconds",
    "tokens/s", "MFU", "HFU", "memory, GiB",
)  # fmt: skip
def schedules_table() -> Iterator[list[object]]:
    """Yield Frontier's models as published, with our schedules, and as the search finds them."""
    for model, layouts in SCHEDULES.items():
        ranks = ranks_of(f"frontier_{model.lower()}")
        found = {name: _chosen(composed(*keys), ranks) for name, keys in layouts.items()}
        searched = composed(*layouts[f"`frontier_{model.lower()}`"], *SEARCH)
        found["best found"] = search(searched, Goal(ranks, PER_NODE)).best[0]
        for name, run in found.items():
            config, grid = run.candidate.config, run.candidate.grid
            yield [
                model,
                grid.size,
                config.data.global_batch,
                name,
                f"{grid.tensor}x{grid.pipeline}x{config.parallel.chunks}",
                run.candidate.schedule,
                config.recompute,
                f"{run.time.seconds:.1f}",
                format_count(run.tokens_per_second),
                f"{run.mfu or 0:.1%}",
                f"{run.hfu or 0:.1%}",
                _memory(run),
            ]


def _chosen(config: RunConfig, ranks: int) -> Estimate:
    """Predict a step after what is `auto` has been chosen."""
    return predict(choose(config, ranks, PER_NODE), ranks)


@headed(
    "model", "GCDs", "replicas", "weak scaling: HFU", "weak: efficiency", "strong scaling: HFU",
    "strong: efficiency", "memory, GiB",
)  # fmt: skip
def scaling_table() -> Iterator[list[object]]:
    """Yield the scaling curves of Frontier's layouts."""
    for model, curves in CURVES.items():
        for point in scaling(curves):
            pairs = zip(point.runs, point.efficiencies, strict=True)
            cells = [
                cell for run, share in pairs for cell in (f"{run.hfu or 0:.1%}", f"{share:.0%}")
            ]
            yield [
                model,
                point.ranks,
                point.runs[0].candidate.grid.data,
                *cells,
                _memory(point.runs[1]),
            ]


def scaling(curves: Curves, *overrides: str) -> Iterator[Point]:
    """Yield the points of the scaling curves of a layout.

    Raises:
        ConfigError: a batch cannot be divided over replicas and micro-batches.
    """
    config = curves.config(*overrides)
    first: list[Estimate] = []
    for ranks in curves.ranks:
        runs = curves.runs(config, ranks)
        first = first or runs
        pairs = zip(runs, first, strict=True)
        relative = [run.tokens_per_device / start.tokens_per_device for run, start in pairs]
        yield Point(ranks, runs, relative)


@headed("model", "nodes", "NAME", "predicted time of a step", "TIME for 20 steps")
def first_runs_table() -> Iterator[list[object]]:
    """Yield the predicted seconds per step of the models of the paper, and a time limit."""
    for name in FIRST_RUNS:
        run = _chosen(composed(f"experiment={name}"), ranks_of(name))
        grid, chunks = run.candidate.grid, run.candidate.config.parallel.chunks
        layout = f"TP {grid.tensor} x PP {grid.pipeline}" + (f" x {chunks} chunks" * (chunks > 1))
        yield [
            f"{name.split('_')[1].upper()}, {layout}", grid.size // PER_NODE, f"`{name}`",
            f"{run.time.seconds:.0f} s", _job_time(run.time.seconds, 20),
        ]  # fmt: skip


@headed(
    "NAME", "nodes", "weak scaling: samples", "step", "TIME", "strong scaling: samples", "step",
    "TIME",
)  # fmt: skip
def recipes_table() -> Iterator[list[object]]:
    """Yield the predicted seconds per step of the scaling runs, as the experiments set them."""
    for curves in LAYOUTS:
        config = composed(f"experiment={curves.experiment}")
        for nodes in config.planner.nodes or ():
            cells: list[object] = [f"`{curves.experiment}`", nodes]
            for run in curves.runs(config, nodes * PER_NODE):
                seconds, batch = run.time.seconds, run.candidate.config.data.global_batch
                cells += [batch, f"{seconds:.0f} s", _job_time(seconds, config.trainer.steps)]
            yield cells


def _job_time(step_seconds: float, steps: int) -> str:
    """Return the time limit of a job in quarters of an hour, with a fifth to spare.

    The evaluation at the end takes a quarter of a step, and the start up to 15 minutes.
    """
    quarters = math.ceil(1.2 * (steps + 0.25) * step_seconds / 900) + 1
    return f"{quarters // 4:02d}:{15 * (quarters % 4):02d}:00"


def _memory(estimated: Estimate) -> str:
    """Return the GiB that the fullest rank needs."""
    refused = ", does not fit" if estimated.refused else ""
    return f"{estimated.peak.total / GIB:.1f}{refused}"


PAGES = {
    "docs/planner.md": {
        "validation": validation,
        "choices": choices_table,
        "amsp": amsp_table,
        "schedules": schedules_table,
        "frontier": scaling_table,
    },
    "docs/running-on-frontier.md": {
        "first_runs": first_runs_table,
        "scaling_runs": recipes_table,
    },
}
