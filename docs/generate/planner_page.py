"""Write the tables of docs/planner.md, which the planner predicts for configurations of `conf/`.

`python -m docs.generate.planner_page` checks whether the tables are current; `--write` writes them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.planner_accuracy import errors, in_sample, left_out, table_choices
from benchmarks.published.tables import TABLES
from docs.generate.marked_page import filled, keep_current
from docs.generate.models_and_clusters_page import composed as composed_anew
from frontier_llm.cli.compose import groups
from frontier_llm.cli.experiments import Header, composed
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.planner.schedule_choice import choose_schedule
from frontier_llm.planner.search import Goal, search
from frontier_llm.units import GIB, format_count

PAGE = CONF.parent / "docs" / "planner.md"
BF16_GRADIENTS = "collectives.grads_format=bf16"
"""Override that sends gradients in two bytes per element, as the papers do."""
BF16_SUMS = "planner.engine.sums_bytes=2"
"""Override for sums of gradients over replicas in bf16, as in AMSP and DeepSpeed."""
PUBLISHED_SCHEDULE = (
    "parallel.chunks=1",
    "parallel.schedule=1f1b",
    "parallel.waiting_weights=0",
    "parallel.sequence=false",
)
"""Settings of the pipeline in the paper on Frontier."""
MOST_ROWS = 12
"""Largest number of rows of a table that the page shows one by one."""
AMSP_PAPER_FACTORS = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}
"""Factors of parameters, gradients and optimizer states in the AMSP paper, by model size."""
AMSP_RANKS = (8, 64, 256, 1024)
PAPER_175B = ("experiment=frontier_175b", "parallel.pipeline=16", *PUBLISHED_SCHEDULE)
AUTO = ("parallel.schedule=auto", "parallel.waiting_weights=auto")
FRONTIER_SCHEDULES = {
    "175B": (
        ("as published", PAPER_175B),
        (
            "6 chunks on the published stages",
            ("experiment=frontier_175b", "parallel.pipeline=16", "parallel.chunks=6", *AUTO),
        ),
        ("`frontier_175b`", ("experiment=frontier_175b",)),
    ),
    "1T": (
        ("as published", ("experiment=frontier_1t", "parallel.pipeline=64", *PUBLISHED_SCHEDULE)),
        (
            "2 chunks on the published stages",
            ("experiment=frontier_1t", "parallel.pipeline=64", "parallel.chunks=2", *AUTO),
        ),
        ("`frontier_1t`", ("experiment=frontier_1t",)),
    ),
}
"""By model: layouts with their overrides. All rows of a model have the same batch."""
FRONTIER_SEARCH = ("planner.tensor=[4,8]", "planner.micro_batch=[1]", "planner.rows=1")
"""Values to which the search for the fastest layout is restricted."""
FRONTIER_RUNS = {
    "175B": (PAPER_175B, (64, 128, 256, 512, 1024), 8000, 640),
    "1T": (("experiment=frontier_1t_tp8",), (512, 1024, 1536, 3072), 8016, 1336),
}
"""By model: the paper's layout, the numbers of ranks, the samples of a step in strong scaling, and
the samples per replica and step in weak scaling."""
MT5_MODELS = ("mt5_base", "mt5_large", "mt5_xl", "mt5_7b", "mt5_xxl")
MT5_NODES = (2, 4, 8)
GPUS_PER_NODE = 8
MT5_SAMPLES_PER_GPU = 8
"""Samples per GPU and step. The global batch therefore grows with the number of nodes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of the page, or check whether they are current."""
    return keep_current(__doc__, "docs.generate.planner_page", arguments, files)


def files() -> dict[Path, str]:
    """Return the text of the page with newly predicted tables, by its path."""
    tables = {
        "validation": validation(),
        "choices": choices_table(),
        "engines": engines_table(),
        "amsp": amsp_table(),
        "schedules": schedules_table(),
        "frontier": frontier_table(),
        "mt5": mt5_table(),
    }
    return {PAGE: filled(PAGE.read_text(), tables)}


def validation() -> Iterator[str]:
    """Yield the errors of all tables, and the rows of the small ones."""
    yield "| table | runs | mean error, left out | largest | mean error, in sample | largest |"
    yield "|---|---|---|---|---|---|"
    for name, table in TABLES.items():
        runs = in_sample(name)
        cells = [f"{value:.1%}" for of in (left_out(name), runs) for value in errors(of)]
        mark = f" ({table.note})" if table.note else ""
        yield f"| [{table.title}]({_file(name)}){mark} | {len(runs)} | " + " | ".join(cells) + " |"
    yield ""
    yield "| run | measured | left out | error | in sample | error |"
    yield "|---|---|---|---|---|---|"
    for name in TABLES:
        if len(in_sample(name)) <= MOST_ROWS:
            for first, second in zip(left_out(name), in_sample(name), strict=True):
                cells = [f"{c.predicted:.1f} | {c.error:+.1%}" for c in (first, second)]
                yield (
                    f"| {first.run.label} | {first.run.measured:.1f} | " + " | ".join(cells) + " |"
                )


def choices_table() -> Iterator[str]:
    """Yield how well the planner chooses among the measured layouts of a job."""
    yield "| table | constants | fastest chosen | regret, mean | largest | rank correlation |"
    yield "|" + "---|" * 6
    for name, table in TABLES.items():
        for kind, found in table_choices(name).items():
            order = found.rank_correlation
            ranked = "" if order is None else f"{order:.2f} ({found.ranked} jobs)"
            yield (
                f"| [{table.title}]({_file(name)}) | {kind} | {found.fastest} of {found.jobs} | "
                f"{found.regret:.1%} | {found.largest_regret:.1%} | {ranked} |"
            )


def _file(name: str) -> str:
    return f"../benchmarks/published/{name}.csv"


def engines_table() -> Iterator[str]:
    """Yield the values of all engines, by key."""
    engines = {
        name: composed(f"planner.engine={name}").planner.engine.model_dump()
        for name in groups()["engine"]
    }
    yield "| key | " + " | ".join(f"`{name}`" for name in engines) + " |"
    yield "|---|" + "---|" * len(engines)
    for key in next(iter(engines.values())):
        if key not in ("name", "host", "source"):
            cells = [_plain(values[key]) for values in engines.values()]
            yield f"| `{key}` | " + " | ".join(cells) + " |"


def _plain(value: object) -> str:
    """Return a value of an engine; the empty string for what it lacks."""
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


def amsp_table() -> Iterator[str]:
    """Yield the factors that the search chooses, the paper's factors, and the speed-ups."""
    yield (
        "| model | ranks | chosen factors | MFU | paper's factors | MFU | speed-up over MiCS | "
        "over ZeRO-1 | over ZeRO-3 |"
    )
    yield "|" + "---|" * 9
    for model, paper_factors in AMSP_PAPER_FACTORS.items():
        for ranks in AMSP_RANKS:
            cells = _amsp_cells(model, ranks, paper_factors)
            yield f"| {model.upper()} | {ranks} | " + " | ".join(cells) + " |"


def schedules_table() -> Iterator[str]:
    """Yield Frontier's models as published, with our schedules, and as the search finds them."""
    yield (
        "| model | GCDs | samples | layout | TP x PP x chunks | schedule | recompute | seconds | "
        "tokens/s | MFU | HFU | memory, GiB |"
    )
    yield "|" + "---|" * 12
    for model, layouts in FRONTIER_SCHEDULES.items():
        ranks = Header.read(CONF / "experiment" / f"{layouts[-1][0].strip('`')}.yaml").ranks
        for name, overrides in layouts:
            config = choose_schedule(composed_anew(*overrides), ranks, GPUS_PER_NODE)
            estimated = estimate(Candidate.of(config, ranks, GPUS_PER_NODE))
            yield _schedule_row(model, name, estimated)
        searched = composed_anew(*layouts[-1][1], *FRONTIER_SEARCH)
        fastest = search(searched, Goal(ranks, GPUS_PER_NODE)).best[0]
        yield _schedule_row(model, "fastest found", fastest)


def _schedule_row(model: str, name: str, estimated: Estimate) -> str:
    candidate = estimated.candidate
    config, grid = candidate.config, candidate.grid
    cells = [
        model,
        str(grid.size),
        str(config.data.global_batch),
        name,
        f"{grid.tensor} x {grid.pipeline} x {config.parallel.chunks}",
        candidate.schedule,
        config.recompute,
        f"{estimated.time.seconds:.1f}",
        format_count(estimated.tokens_per_second),
        f"{estimated.mfu or 0:.1%}",
        f"{estimated.hfu or 0:.1%}",
        f"{estimated.peak.total / GIB:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def frontier_table() -> Iterator[str]:
    """Yield the scaling curves of Frontier's layouts."""
    yield (
        "| model | GCDs | replicas | weak scaling: HFU | weak: efficiency | strong scaling: HFU | "
        "strong: efficiency |"
    )
    yield "|" + "---|" * 7
    for model in FRONTIER_RUNS:
        for ranks, replicas, runs, efficiencies in frontier_scaling(model):
            cells = [
                f"{run.hfu or 0:.1%} | {efficiency:.0%}"
                for run, efficiency in zip(runs, efficiencies, strict=True)
            ]
            yield f"| {model} | {ranks} | {replicas} | " + " | ".join(cells) + " |"


def frontier_scaling(model: str) -> Iterator[tuple[int, int, list[Estimate], list[float]]]:
    """Yield the points of the scaling curves of a model on Frontier.

    Yields:
        ranks, replicas, the runs of weak and of strong scaling, and the throughput per GCD of each
        relative to that of the first point.
    """
    experiment, rank_counts, strong_batch, replica_batch = FRONTIER_RUNS[model]
    config = composed(*experiment, BF16_GRADIENTS, BF16_SUMS)
    first: list[Estimate] = []
    for ranks in rank_counts:
        replicas = ranks // (config.parallel.tensor * config.parallel.pipeline)
        batches = (replica_batch * replicas, strong_batch)
        runs = [_with_batch(config, ranks, batch) for batch in batches]
        first = first or runs
        efficiencies = [
            _tokens_per_device(run) / _tokens_per_device(start)
            for run, start in zip(runs, first, strict=True)
        ]
        yield ranks, replicas, runs, efficiencies


def mt5_table() -> Iterator[str]:
    """Yield the step times of mT5 models on A100 nodes, with each ZeRO stage."""
    zero_columns = " | ".join(f"ZeRO-{stage}" for stage in (1, 2, 3))
    yield f"| model | nodes | samples per step | {zero_columns} | parts of the fastest step |"
    yield "|" + "---|" * 7
    for model in MT5_MODELS:
        for nodes in MT5_NODES:
            estimates = [mt5_estimate(model, nodes, stage) for stage in (1, 2, 3)]
            cells = [_step_seconds(estimated) for estimated in estimates]
            fitting = [estimated for estimated in estimates if not estimated.refused]
            fastest = min(fitting, key=lambda fits: fits.time.seconds, default=None)
            samples = nodes * GPUS_PER_NODE * MT5_SAMPLES_PER_GPU
            parts = _largest_parts(fastest) if fastest else ""
            yield f"| {model} | {nodes} | {samples} | " + " | ".join([*cells, parts]) + " |"


def _amsp_cells(model: str, ranks: int, paper_factors: tuple[int, int, int]) -> Iterator[str]:
    """Yield the cells of a row of the AMSP table, from the chosen factors on."""
    recompute = "full" if model == "30b" else "none"
    experiment = f"experiment=amsp_llama_{model}"
    overrides = (experiment, BF16_GRADIENTS, BF16_SUMS, f"recompute={recompute}")
    config = composed(*overrides)
    only_factors_free = config.planner.model_copy(
        update={
            "tensor": (1,),
            "pipeline": (1,),
            "micro_batch": (1,),
            "recompute": (config.recompute,),
            "rows": 1,
        }
    )
    searched = config.model_copy(update={"planner": only_factors_free})
    layouts = search(searched, Goal(ranks, config.cluster.ranks_per_node)).best
    if not layouts:
        yield from ["none fits", *[""] * 6]
        return
    best = layouts[0]
    factors = best.candidate.factors
    yield f"{factors.params}, {factors.grads}, {factors.optimizer}"
    yield f"{best.mfu or 0:.1%}"
    in_node = min(GPUS_PER_NODE, ranks)
    mics, zero1, zero3 = (in_node, in_node, in_node), (1, 1, ranks), (ranks, ranks, ranks)
    with_paper_factors = _with_factors(config, ranks, paper_factors)
    yield ", ".join(map(str, paper_factors))
    yield _mfu(with_paper_factors)
    for other_factors in (mics, zero1, zero3):
        yield _speed_up(best, _with_factors(config, ranks, other_factors))


def _with_factors(config: RunConfig, ranks: int, factors: tuple[int, int, int]) -> Estimate | None:
    """Predict a step with other factors; None if these factors do not divide the ranks."""
    keys = ("params", "grads", "optimizer")
    changed = config.sharding.model_copy(update=dict(zip(keys, factors, strict=True)))
    try:
        candidate = Candidate.of(
            config.model_copy(update={"sharding": changed}), ranks, config.cluster.ranks_per_node
        )
    except ConfigError:
        return None
    return estimate(candidate)


def _mfu(estimated: Estimate | None) -> str:
    if estimated is None or estimated.refused:
        return "does not fit" if estimated else "-"
    return f"{estimated.mfu or 0:.1%}"


def _speed_up(best: Estimate, other: Estimate | None) -> str:
    if other is None or other.refused:
        return "does not fit" if other else "-"
    return f"{other.time.seconds / best.time.seconds:.2f}x"


def _with_batch(config: RunConfig, ranks: int, batch: int) -> Estimate:
    """Predict a step with another number of samples per step."""
    data = config.data.model_copy(update={"global_batch": batch})
    changed = config.model_copy(update={"data": data})
    return estimate(Candidate.of(changed, ranks, config.cluster.ranks_per_node))


def _tokens_per_device(estimated: Estimate) -> float:
    return estimated.tokens_per_second / estimated.candidate.grid.size


def mt5_estimate(model: str, nodes: int, stage: int) -> Estimate:
    """Predict a step of an mT5 model on nodes of 8 A100, with a ZeRO stage."""
    ranks = nodes * GPUS_PER_NODE
    config = composed_anew(
        f"model={model}",
        "data=stdlib_spans",
        "cluster=a100_80g",
        "precision=bf16",
        f"sharding=zero{stage}",
        "parallel.pipeline=1",
        "recompute=full",
        "data.sequence_length=1024",
        f"data.global_batch={ranks * MT5_SAMPLES_PER_GPU}",
        f"data.micro_batch={MT5_SAMPLES_PER_GPU}",
        BF16_GRADIENTS,
        BF16_SUMS,
    )
    return estimate(Candidate.of(config, ranks, GPUS_PER_NODE))


def _step_seconds(estimated: Estimate) -> str:
    if estimated.refused:
        return "does not fit"
    return f"{estimated.time.seconds:.2f} s"


def _largest_parts(estimated: Estimate) -> str:
    """Name the three largest parts of a step, with their shares of its seconds."""
    parts = sorted(estimated.time.parts.items(), key=lambda item: -item[1])[:3]
    total = estimated.time.seconds
    return ", ".join(f"{name.replace('_', ' ')} {seconds / total:.0%}" for name, seconds in parts)


if __name__ == "__main__":
    sys.exit(run_command(main))
