"""The tables of docs/planner.md, predicted from `conf/` by `planner/`.

`python -m docs.generate.planner_page` checks whether they are current; `--write` writes them.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.planner_accuracy import errors, left_out, predict_all
from benchmarks.published.predict import Prediction, composed
from benchmarks.published.published import SOURCES
from docs.generate.marked_page import filled, keep_current
from docs.generate.models_and_clusters_page import composed as composed_anew
from frontier_llm.cli.options import run_command
from frontier_llm.cli.package_files import CONF
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.compute import Engine
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.planner.search import Goal, search

PAGE = CONF.parent / "docs" / "planner.md"
PAPER_WIRE = "collectives.grads_format=bf16"
BF16_SUMS = Engine(sums_bytes=2)
"""This program, but with gradients summed in bf16 as in AMSP and DeepSpeed."""
AMSP_PAPER = {"7b": (1, 1, 8), "13b": (4, 4, 8), "30b": (8, 8, 32)}
AMSP_RANKS = (8, 64, 256, 1024)
FRONTIER = {
    "175B": ("experiment=frontier_175b", (64, 128, 256, 512, 1024), 8000, 640),
    "1T": ("experiment=frontier_1t_tp8", (512, 1024, 1536, 3072), 8016, 1336),
}
"""Overrides, ranks, batch of strong scaling, batch per replica of weak scaling."""
MT5 = ("mt5_base", "mt5_large", "mt5_xl", "mt5_7b", "mt5_xxl")
MT5_NODES = (2, 4, 8)
MT5_SAMPLES = 8
"""Samples per GPU and step; the batch grows with the nodes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page's tables, or check whether they are current."""
    return keep_current(__doc__, "docs.generate.planner_page", arguments, files)


def files() -> dict[Path, str]:
    """Return the page with its tables."""
    tables = {
        "validation": validation(),
        "left out": unseen(),
        "amsp": amsp(),
        "frontier": frontier(),
        "mt5": mt5(),
    }
    return {PAGE: filled(PAGE.read_text(), tables)}


def validation() -> Iterator[str]:
    """Yield every published figure with its prediction and error."""
    predictions = predict_all()
    for table, source in SOURCES.items():
        yield f"**{table}** ({source})"
        yield ""
        yield "| figure | reading | printed | predicted | error | beyond rounding |"
        yield "|---|---|---|---|---|---|"
        for prediction in predictions:
            if prediction.row.table == table:
                yield _validation_row(prediction)
        yield ""
    mean, worst = errors(predictions)
    yield (
        f"Mean absolute error {mean:.1%}, worst {worst:.1%}, over the readings that count (bold), "
        "beyond rounding."
    )


def unseen() -> Iterator[str]:
    """Yield the error of each table under constants that were fitted without it."""
    yield "| table | predicted with | mean absolute error | worst |"
    yield "|---|---|---|---|"
    for name, words, predictions in left_out():
        mean, worst = errors(predictions)
        yield f"| {name} | {words} | {mean:.1%} | {worst:.1%} |"


def amsp() -> Iterator[str]:
    """Yield the factors that the search chooses, those of the paper, and the gain over others."""
    yield (
        "| model | ranks | chosen | MFU | the paper's | MFU | over MiCS | over ZeRO-1 | "
        "over ZeRO-3 |"
    )
    yield "|" + "---|" * 9
    for model, paper in AMSP_PAPER.items():
        for ranks in AMSP_RANKS:
            yield f"| {model.upper()} | {ranks} | " + " | ".join(_amsp(model, ranks, paper)) + " |"


def frontier() -> Iterator[str]:
    """Yield the scaling curves of Frontier's layouts."""
    yield ("| model | GCDs | replicas | weak: HFU | efficiency | strong: HFU | efficiency |")
    yield "|" + "---|" * 7
    for name, (experiment, numbers, batch, of_replica) in FRONTIER.items():
        config = composed((experiment, PAPER_WIRE))
        first: list[Estimate] = []
        for ranks in numbers:
            replicas = ranks // (config.parallel.tensor * config.parallel.pipeline)
            points = [_batch(config, ranks, of_replica * replicas), _batch(config, ranks, batch)]
            first = first or points
            cells = [
                f"{point.hfu or 0:.1%} | {_per_device(point) / _per_device(start):.0%}"
                for point, start in zip(points, first, strict=True)
            ]
            yield f"| {name} | {ranks} | {replicas} | " + " | ".join(cells) + " |"


def mt5() -> Iterator[str]:
    """Yield the seconds of a step of mT5 models over ZeRO's stages and nodes of 8 A100."""
    head = " | ".join(f"ZeRO-{stage}" for stage in (1, 2, 3))
    yield f"| model | nodes | samples a step | {head} | the best one's seconds go to |"
    yield "|" + "---|" * 7
    for model in MT5:
        for nodes in MT5_NODES:
            estimated = [_mt5(model, nodes, stage) for stage in (1, 2, 3)]
            cells = [_seconds(one) for one in estimated]
            fitting = [one for one in estimated if one and not one.refused]
            best = min(fitting, key=lambda one: one.time.seconds, default=None)
            samples = nodes * 8 * MT5_SAMPLES
            words = _largest_parts(best) if best else ""
            yield f"| {model} | {nodes} | {samples} | " + " | ".join([*cells, words]) + " |"


def _validation_row(prediction: Prediction) -> str:
    row = prediction.row
    write = "{:.1f}" if row.quantity == "hardware_tflops" else "{:.1%}"
    name = f"**{row.name}**" if row.counts else row.name
    cells = [
        name,
        row.reading,
        write.format(row.published),
        write.format(prediction.predicted),
        f"{prediction.error:+.1%}",
        f"{prediction.error_beyond_rounding:+.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _amsp(model: str, ranks: int, paper: tuple[int, int, int]) -> Iterator[str]:
    again = "full" if model == "30b" else "none"
    config = composed((f"experiment=amsp_llama_{model}", PAPER_WIRE, f"recompute={again}"))
    fixed = config.planner.model_copy(
        update={
            "tensor": (1,),
            "pipeline": (1,),
            "micro_batch": (1,),
            "recompute": (config.recompute,),
            "rows": 1,
        }
    )
    free = config.model_copy(update={"planner": fixed})
    found = search(free, Goal(ranks, config.cluster.ranks_per_node, BF16_SUMS)).best
    if not found:
        yield from ["none fits", *[""] * 6]
        return
    best = found[0]
    factors = best.candidate.factors
    yield f"{factors.params}, {factors.grads}, {factors.optimizer}"
    yield f"{best.mfu or 0:.1%}"
    node = min(8, ranks)
    others = [paper, (node, node, node), (1, 1, ranks), (ranks, ranks, ranks)]
    estimated = [_factors(config, ranks, chosen) for chosen in others]
    yield ", ".join(map(str, paper))
    yield _share(estimated[0])
    yield from (_gain(best, one) for one in estimated[1:])


def _factors(config: RunConfig, ranks: int, factors: tuple[int, int, int]) -> Estimate | None:
    """Predict a step with other factors and the same engine; None = they do not divide."""
    keys = ("params", "grads", "optimizer")
    changed = config.sharding.model_copy(update=dict(zip(keys, factors, strict=True)))
    try:
        candidate = Candidate.of(
            config.model_copy(update={"sharding": changed}), ranks, config.cluster.ranks_per_node
        )
    except ConfigError:
        return None
    return estimate(candidate, BF16_SUMS)


def _share(estimated: Estimate | None) -> str:
    if estimated is None or estimated.refused:
        return "does not fit" if estimated else "-"
    return f"{estimated.mfu or 0:.1%}"


def _gain(best: Estimate, other: Estimate | None) -> str:
    if other is None or other.refused:
        return "does not fit" if other else "-"
    return f"{other.time.seconds / best.time.seconds:.2f}x"


def _batch(config: RunConfig, ranks: int, batch: int) -> Estimate:
    data = config.data.model_copy(update={"global_batch": batch})
    changed = config.model_copy(update={"data": data})
    return estimate(Candidate.of(changed, ranks, config.cluster.ranks_per_node), BF16_SUMS)


def _per_device(estimated: Estimate) -> float:
    return estimated.tokens_per_second / estimated.candidate.grid.size


def _mt5(model: str, nodes: int, stage: int) -> Estimate | None:
    config = composed_anew(
        f"model={model}",
        "data=stdlib_spans",
        "cluster=a100_80g",
        "precision=bf16",
        f"sharding=zero{stage}",
        "parallel.pipeline=1",
        "recompute=full",
        "data.sequence_length=1024",
        f"data.global_batch={nodes * 8 * MT5_SAMPLES}",
        f"data.micro_batch={MT5_SAMPLES}",
        PAPER_WIRE,
    )
    return estimate(Candidate.of(config, nodes * 8, 8), BF16_SUMS)


def _seconds(estimated: Estimate | None) -> str:
    if estimated is None or estimated.refused:
        return "does not fit"
    return f"{estimated.time.seconds:.2f} s"


def _largest_parts(estimated: Estimate) -> str:
    parts = sorted(estimated.time.parts.items(), key=lambda item: -item[1])[:3]
    total = estimated.time.seconds
    return ", ".join(f"{name.replace('_', ' ')} {seconds / total:.0%}" for name, seconds in parts)


if __name__ == "__main__":
    sys.exit(run_command(main))
