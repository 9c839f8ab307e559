"""Tables of the pages about Frontier: schedules, scaling curves and jobs."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from docs.generate.blocks import headed
from docs.generate.predictions import BF16_GRADIENTS, predict, ranks_of
from frontier_lab.planning.search import Goal, search
from frontier_llm.cli.experiments import composed
from frontier_llm.config import RunConfig
from frontier_llm.planner.choice import choose
from frontier_llm.planner.estimate import Estimate
from frontier_llm.units import GIB, format_count

RANKS_PER_NODE = 8
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

    @property
    def ends(self) -> "Curves":
        """The curves of the first and the last run only."""
        return self._replace(ranks=(self.ranks[0], self.ranks[-1]))


CURVES = {
    "175B": Curves("frontier_175b_scaling", (64, 128, 256, 512, 1024), 640, (100, 89)),
    "1T": Curves("frontier_1t_scaling", (512, 1024, 1536, 3072), 1336, (100, 87)),
}
"""The scaling curves of the paper, by model."""
LAYOUTS = (
    *CURVES.items(),
    ("1T", CURVES["1T"]._replace(experiment="frontier_1t_tp4_scaling")),
)
"""Models and curves with jobs: also 1T in the layout of another script."""


class Point(NamedTuple):
    """The runs on one number of ranks; the first value of a pair is that of weak scaling."""

    ranks: int
    replicas: int
    runs: tuple[Estimate, Estimate]
    efficiencies: tuple[float, float]
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
        found["best found"] = search(searched, Goal(ranks, RANKS_PER_NODE)).best[0]
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
    return predict(choose(config, ranks, RANKS_PER_NODE), ranks)


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
            yield [model, point.ranks, point.replicas, *cells, _memory(point.runs[1])]


def scaling(curves: Curves, *overrides: str) -> Iterator[Point]:
    """Yield the points of the scaling curves of a layout.

    Raises:
        ConfigError: a batch cannot be divided over replicas and micro-batches.
    """
    config = curves.config(*overrides)
    first: tuple[Estimate, Estimate] | None = None
    for ranks in curves.ranks:
        replicas = ranks // (config.parallel.tensor * config.parallel.pipeline)
        weak, strong = curves.replica_batch * replicas, config.data.global_batch
        runs = (
            predict(config, ranks, global_batch=weak),
            predict(config, ranks, global_batch=strong),
        )
        first = first or runs
        relative = [
            run.tokens_per_device / start.tokens_per_device
            for run, start in zip(runs, first, strict=True)
        ]
        yield Point(ranks, replicas, runs, (relative[0], relative[1]))


@headed("model", "nodes", "NAME", "predicted time of a step", "TIME for 20 steps")
def first_runs_table() -> Iterator[list[object]]:
    """Yield the predicted seconds per step of the models of the paper, and a time limit."""
    for name in FIRST_RUNS:
        run = _chosen(composed(f"experiment={name}"), ranks_of(name))
        grid, chunks = run.candidate.grid, run.candidate.config.parallel.chunks
        layout = f"TP {grid.tensor} x PP {grid.pipeline}" + (f" x {chunks} chunks" * (chunks > 1))
        yield [
            f"{name.split('_')[1].upper()}, {layout}", grid.size // RANKS_PER_NODE, f"`{name}`",
            f"{run.time.seconds:.0f} s", _job_time(run.time.seconds, 20),
        ]  # fmt: skip


@headed(
    "NAME", "nodes", "weak scaling: samples", "step", "TIME", "strong scaling: samples", "step",
    "TIME",
)  # fmt: skip
def recipes_table() -> Iterator[list[object]]:
    """Yield the predicted seconds per step of the scaling runs, as the experiments set them."""
    for _, curves in LAYOUTS:
        config = composed(f"experiment={curves.experiment}")
        for nodes in config.planner.nodes or ():
            ranks = nodes * RANKS_PER_NODE
            replicas = ranks // (config.parallel.tensor * config.parallel.pipeline)
            cells: list[object] = [f"`{curves.experiment}`", nodes]
            for batch in (curves.replica_batch * replicas, config.data.global_batch):
                seconds = predict(config, ranks, global_batch=batch).time.seconds
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
