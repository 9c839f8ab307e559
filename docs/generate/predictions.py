"""Predict steps for the pages, and name the settings that several pages predict with."""

from frontier_llm.cli.experiments import composed
from frontier_llm.config import RunConfig
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate

BF16_GRADIENTS = "collectives=bf16"
"""Override that sends gradients in two bytes per element, as the papers do."""
GPUS_PER_NODE = 8
SAMPLES_PER_GPU = 8
"""Samples per GPU and step. The global batch therefore grows with the number of nodes."""


def predict(config: RunConfig, ranks: int, **data: int) -> Estimate:
    """Predict a step on `ranks` ranks, with other values of `data`, such as the global batch.

    Raises:
        ConfigError: the configuration cannot be laid out over the ranks.
    """
    changed = config.changed("data", **data)
    return estimate(Candidate.of(changed, ranks, config.cluster.ranks_per_node))


def with_factors(config: RunConfig, factors: tuple[int, int, int]) -> RunConfig:
    """Return a configuration with other numbers of ranks per parameter, gradient and state."""
    keys = ("params", "grads", "optimizer")
    return config.changed("sharding", **dict(zip(keys, factors, strict=True)))


def with_network(config: RunConfig, node_gbits: float | None) -> RunConfig:
    """Return a configuration whose nodes have a network of some Gbit/s, which their ranks share.

    None = the network of the cluster file.
    """
    if node_gbits is None:
        return config
    cluster = config.cluster
    rate = node_gbits / 8 / cluster.ranks_per_node
    network = cluster.links[-1].model_copy(update={"gb_per_second": rate})
    return config.changed("cluster", links=(*cluster.links[:-1], network))


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
