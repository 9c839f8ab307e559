"""Continue a run on another number of ranks by changing its data parallelism.

Tensor and pipeline parallelism and the global batch stay the same, and so do losses and the order
of samples.
"""

from frontier_llm.config.data import DataConfig
from frontier_llm.config.parallel import ParallelConfig
from frontier_llm.config.sharding import ShardingConfig
from frontier_llm.errors import ConfigError


def refit(
    parallel: ParallelConfig, data: DataConfig, sharding: ShardingConfig, world_size: int
) -> dict[str, int]:
    """Choose new values with which a configuration runs on `world_size` ranks.

    The new micro-batch is the largest one, up to the configured one, with which the replicas divide
    the global batch.

    Sharding factors that are numbers are chosen in the order `optimizer`, `grads`, `params`: each
    becomes the largest number, up to the configured one, that divides the one before it. The first
    one divides the number of replicas.

    Returns:
        New values by key. It is empty if the configuration fits as it is, and if the ranks are no
        multiple of tensor x pipeline ranks, which `config.rules.check` reports.

    Raises:
        ConfigError: the replicas cannot divide the global batch at all.
    """
    model_ranks = parallel.tensor * parallel.pipeline
    if world_size % model_ranks:
        return {}
    replicas = world_size // model_ranks
    return {**_micro_batch(data, replicas, model_ranks), **_factors(sharding, replicas)}


def _micro_batch(data: DataConfig, replicas: int, model_ranks: int) -> dict[str, int]:
    share, rest = divmod(data.global_batch, replicas)
    if rest:
        fitting = [d * model_ranks for d in divisors(data.global_batch)]
        raise ConfigError(
            "launch.elastic",
            f"data.global_batch={data.global_batch} on {replicas} data-parallel replicas",
            "replicas that divide the global batch, which an elastic run keeps",
            f"start one of {', '.join(map(str, fitting))} ranks",
        )
    fitted = max(d for d in divisors(share) if d <= data.micro_batch)
    return {"data.micro_batch": fitted} if fitted != data.micro_batch else {}


def _factors(sharding: ShardingConfig, replicas: int) -> dict[str, int]:
    """Fit factors that are numbers; `node`, `all` and `auto` fit any number of ranks."""
    changed, limit = {}, replicas
    for name in ("optimizer", "grads", "params"):
        wanted = getattr(sharding, name)
        if isinstance(wanted, int):
            fitted = max(d for d in divisors(limit) if d <= wanted)
            if fitted != wanted:
                changed[f"sharding.{name}"] = fitted
            limit = fitted
    return changed


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
