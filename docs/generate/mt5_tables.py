"""Predictions for mT5: the data parallelism of a study, and our experiments."""

from docs.generate.predictions import BF16_GRADIENTS
from frontier_llm.cli.experiments import composed
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate

MODELS = ("mt5_base", "mt5_large", "mt5_xl", "mt5_7b", "mt5_xxl")
STAGES = (1, 2, 3)
"""ZeRO stages."""
GPUS_PER_NODE = 8
SAMPLES_PER_GPU = 8
"""Samples per GPU and step. The global batch therefore grows with the number of nodes."""


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


def experiment_estimate(name: str, *overrides: str) -> Estimate:
    """Predict a step of an experiment on its own number of nodes."""
    config = composed(f"experiment={name}", *overrides)
    nodes = config.launch.nodes or 1
    return estimate(Candidate.of(config, nodes * GPUS_PER_NODE, GPUS_PER_NODE))
