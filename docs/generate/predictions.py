"""Predict steps for the pages, and name the settings that several pages predict with."""

from frontier_llm.config import RunConfig
from frontier_llm.planner.candidate import Candidate
from frontier_llm.planner.estimate import Estimate, estimate

BF16_GRADIENTS = "collectives=bf16"
"""Override that sends gradients in two bytes per element, as the papers do."""


def predict(config: RunConfig, ranks: int, **data: int) -> Estimate:
    """Predict a step on `ranks` ranks, with other values of `data`, such as the global batch.

    Raises:
        ConfigError: the configuration cannot be laid out over the ranks.
    """
    changed = config.model_copy(update={"data": config.data.model_copy(update=data)})
    return estimate(Candidate.of(changed, ranks, config.cluster.ranks_per_node))


def tokens_per_device(estimated: Estimate) -> float:
    """Return the tokens per second of one device."""
    return estimated.tokens_per_second / estimated.candidate.grid.size


def with_network(config: RunConfig, node_gbits: float | None) -> RunConfig:
    """Return a configuration with another network.

    Args:
        config: the configuration.
        node_gbits: Gbit/s of a node, which its ranks share; None = the network of the cluster file.
    """
    if node_gbits is None:
        return config
    cluster = config.cluster
    rate = node_gbits / 8 / cluster.ranks_per_node
    network = cluster.links[-1].model_copy(update={"gb_per_second": rate})
    changed = cluster.model_copy(update={"links": (*cluster.links[:-1], network)})
    return config.model_copy(update={"cluster": changed})
