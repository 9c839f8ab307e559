"""Predict steps for the pages, and name the settings that several pages predict with."""

from frontier_llm.cli.experiments import Header
from frontier_llm.cli.package_files import CONF
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


def ranks_of(experiment: str) -> int:
    """Return the number of ranks in the header of an experiment."""
    return Header.read(CONF / "experiment" / f"{experiment}.yaml").ranks
