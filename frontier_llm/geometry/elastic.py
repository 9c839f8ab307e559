"""Fit a configuration to another number of ranks by changing its data parallelism.

An elastic run (`launch.elastic`) uses this when it continues on more or fewer ranks. Tensor and
pipeline parallelism and the global batch stay the same, and so do losses and the order of samples.
"""

from collections.abc import Mapping

from frontier_llm.config.data import DataConfig
from frontier_llm.config.parallel import ParallelConfig
from frontier_llm.config.rules import largest_divisor
from frontier_llm.config.run import RunConfig
from frontier_llm.config.sharding import ShardingConfig
from frontier_llm.errors import ConfigError


def refit(
    parallel: ParallelConfig, data: DataConfig, sharding: ShardingConfig, world_size: int
) -> dict[str, int]:
    """Choose new values of some keys with which a configuration runs on `world_size` ranks.

    The new micro-batch is the largest number of samples, at most the configured one, that divides
    the samples of a replica. Sharding factors that are numbers are chosen in the order `optimizer`,
    `grads`, `params`: the largest number, at most the configured one, that divides the factor
    chosen before, and first the number of data ranks. The result is empty if no value has to
    change, or if tensor x pipeline x context does not divide `world_size`, which
    `config.rules.check` reports.

    Raises:
        ConfigError: the number of replicas does not divide the global batch.
    """
    model_ranks = parallel.ranks_per_replica
    if world_size % model_ranks:
        return {}
    replicas = world_size // model_ranks
    replica_samples, rest = divmod(data.global_batch, replicas)
    if rest:
        fitting = [d * model_ranks for d in divisors(data.global_batch)]
        raise ConfigError(
            "launch.elastic",
            f"data.global_batch={data.global_batch} on {replicas} data-parallel replicas",
            "replicas that divide the global batch, which an elastic run keeps",
            f"start it with any of {', '.join(map(str, fitting))} ranks",
        )
    fitted = {"data.micro_batch": largest_divisor(replica_samples, data.micro_batch)}
    before = {"data.micro_batch": data.micro_batch}
    limit = replicas * parallel.context_ranks
    for name in ("optimizer", "grads", "params"):
        configured = getattr(sharding, name)
        if isinstance(configured, int):  # the words `node`, `all` and `auto` fit any ranks
            limit = largest_divisor(limit, configured)
            before[f"sharding.{name}"], fitted[f"sharding.{name}"] = configured, limit
    return {key: value for key, value in fitted.items() if value != before[key]}


def changes_for(config: RunConfig, ranks: int) -> dict[str, int]:
    """Return the changes with which a run continues on a number of ranks; none unless elastic."""
    if not config.launch.elastic:
        return {}
    return refit(config.parallel, config.data, config.sharding, ranks)


def with_changes(config: RunConfig, changes: Mapping[str, int]) -> RunConfig:
    """Return a configuration with other values of keys."""
    for key, value in changes.items():
        section, name = key.split(".")
        config = config.changed(section, **{name: value})
    return config


def fitted_to(config: RunConfig, ranks: int) -> RunConfig:
    """Return the configuration with which a run continues on a number of ranks."""
    return with_changes(config, changes_for(config, ranks))


def fitting_ranks(parallel: ParallelConfig, data: DataConfig, most: int) -> int | None:
    """Return the largest number of ranks up to `most` that an elastic run can use; None if none."""
    model_ranks = parallel.ranks_per_replica
    counts = [replicas * model_ranks for replicas in divisors(data.global_batch)]
    return max((count for count in counts if count <= most), default=None)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
