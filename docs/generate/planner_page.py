"""The tables of docs/planner.md, and those of the runs on Frontier.

The planner predicts them for configurations of `conf/`.
"""

from collections.abc import Iterator

from benchmarks.planner_accuracy import TABLES, choice_rows, error_rows
from docs.generate import frontier_tables
from docs.generate.blocks import headed
from docs.generate.predictions import predict, with_factors
from frontier_lab.planning.search import Goal, search
from frontier_llm.cli.experiments import composed
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.estimate import Estimate

AMSP_PAPER_FACTORS = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}
"""Factors of parameters, gradients and optimizer states in the AMSP paper, by model size."""
AMSP_RANKS = (8, 64, 256, 1024)
GPUS_PER_NODE = 8


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
    in_node = min(GPUS_PER_NODE, ranks)
    mics, zero3 = (in_node, in_node, in_node), (ranks, ranks, ranks)
    with_paper_factors = _with_factors(config, ranks, paper_factors)
    yield "/".join(map(str, paper_factors))
    yield _mfu(with_paper_factors)
    for other_factors in (mics, zero3):
        yield _speed_up(best, _with_factors(config, ranks, other_factors))


def _with_factors(config: RunConfig, ranks: int, factors: tuple[int, int, int]) -> Estimate | None:
    """Predict a step with other factors; None if these factors do not divide the ranks."""
    try:
        return predict(with_factors(config, factors), ranks)
    except ConfigError:
        return None


def _mfu(estimated: Estimate | None) -> str:
    if estimated is None or estimated.refused:
        return "does not fit" if estimated else "-"
    return f"{estimated.mfu or 0:.1%}"


def _speed_up(best: Estimate, other: Estimate | None) -> str:
    if other is None or other.refused:
        return "does not fit" if other else "-"
    return f"{other.time.seconds / best.time.seconds:.2f}x"


PAGES = {
    "docs/planner.md": {
        "validation": validation,
        "choices": choices_table,
        "amsp": amsp_table,
        "schedules": frontier_tables.schedules_table,
        "frontier": frontier_tables.scaling_table,
    },
    "docs/running-on-frontier.md": {
        "first_runs": frontier_tables.first_runs_table,
        "scaling_runs": frontier_tables.recipes_table,
    },
}
