"""Tables of docs/planner.md about mT5: the study's data parallelism, and our experiments."""

from collections.abc import Iterator

from docs.generate.predictions import BF16_GRADIENTS
from frontier_llm.cli.experiments import composed
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate
from frontier_llm.units import GIB

MODELS = ("mt5_base", "mt5_large", "mt5_xl", "mt5_7b", "mt5_xxl")
STAGES = (1, 2, 3)
"""ZeRO stages."""
NODES = (2, 4, 8)
GPUS_PER_NODE = 8
SAMPLES_PER_GPU = 8
"""Samples per GPU and step. The global batch therefore grows with the number of nodes."""


def study_table() -> Iterator[str]:
    """Yield the step times of mT5 models on A100 nodes, with each ZeRO stage."""
    zero_columns = " | ".join(f"ZeRO-{stage}" for stage in STAGES)
    yield f"| model | nodes | samples per step | {zero_columns} | parts of the fastest step |"
    yield "|" + "---|" * 7
    for model in MODELS:
        for nodes in NODES:
            estimates = [study_estimate(model, nodes, stage) for stage in STAGES]
            cells = [_step_seconds(estimated) for estimated in estimates]
            fitting = [estimated for estimated in estimates if not estimated.refused]
            fastest = min(fitting, key=lambda fits: fits.time.seconds, default=None)
            samples = nodes * GPUS_PER_NODE * SAMPLES_PER_GPU
            parts = _largest_parts(fastest) if fastest else ""
            yield f"| {model} | {nodes} | {samples} | " + " | ".join([*cells, parts]) + " |"


def study_estimate(model: str, nodes: int, stage: int) -> Estimate:
    """Predict a step of an mT5 model on nodes of 8 A100, with a ZeRO stage."""
    ranks = nodes * GPUS_PER_NODE
    config = composed(
        f"model={model}",
        "data=stdlib_spans",
        "cluster=a100_80g",
        "precision=bf16",
        f"sharding=zero{stage}",
        "parallel.pipeline=1",
        "recompute=full",
        "data.sequence_length=1024",
        f"data.global_batch={ranks * SAMPLES_PER_GPU}",
        f"data.micro_batch={SAMPLES_PER_GPU}",
        BF16_GRADIENTS,
    )
    return estimate(Candidate.of(config, ranks, GPUS_PER_NODE))


def experiments_table() -> Iterator[str]:
    """Yield the layouts of our experiments beside pure data parallelism on the same GPUs.

    Only the tensor size and the ZeRO stage differ; nodes, batch, micro-batch and recomputation are
    those of the experiment.
    """
    zero_columns = " | ".join(f"data parallel, ZeRO-{stage}" for stage in STAGES)
    yield (
        "| experiment | nodes | tensor x pipeline x data | micro-batch | recompute | step | "
        f"memory, GiB | {zero_columns} |"
    )
    yield "|" + "---|" * 10
    for model in MODELS:
        own = experiment_estimate(model)
        grid, config = own.candidate.grid, own.candidate.config
        cells = [
            f"`{model}`",
            str(config.launch.nodes),
            f"{grid.tensor} x {grid.pipeline} x {grid.data}",
            str(config.data.micro_batch),
            config.recompute,
            _step_seconds(own),
            f"{own.peak.total / GIB:.1f}",
        ]
        for stage in STAGES:
            pure = experiment_estimate(model, "parallel.tensor=1", f"sharding=zero{stage}")
            cells.append(_step_seconds(pure))
        yield "| " + " | ".join(cells) + " |"


def experiment_estimate(name: str, *overrides: str) -> Estimate:
    """Predict a step of an experiment on its own number of nodes."""
    config = composed(f"experiment={name}", *overrides)
    nodes = config.launch.nodes or 1
    return estimate(Candidate.of(config, nodes * GPUS_PER_NODE, GPUS_PER_NODE))


def _step_seconds(estimated: Estimate) -> str:
    if estimated.refused:
        return "does not fit"
    return f"{estimated.time.seconds:.2f} s"


def _largest_parts(estimated: Estimate) -> str:
    """Name the three largest parts of a step, with their shares of its seconds."""
    parts = sorted(estimated.time.parts.items(), key=lambda item: -item[1])[:3]
    total = estimated.time.seconds
    return ", ".join(f"{name.replace('_', ' ')} {seconds / total:.0%}" for name, seconds in parts)
