"""The same run on another number of ranks: what changes is data parallelism, and what hangs on it.

The model's cut and the global batch stay, so losses and the order of samples do too.
"""

from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError


def refit(config: RunConfig, world_size: int) -> dict[str, int]:
    """Choose what must change for a configuration to run on `world_size` ranks.

    The largest micro-batch up to the configured one with which the replicas divide the global
    batch; and for sharding factors that are numbers, the largest divisors of the replicas up to
    them, each dividing the next.

    Returns:
        New values by key; empty where the configuration fits as it is, and where the model's cut
        does not (which is not for this function to mend).

    Raises:
        ConfigError: the replicas cannot divide the global batch at all.
    """
    model_ranks = config.parallel.tensor * config.parallel.pipeline
    if world_size % model_ranks:
        return {}
    replicas = world_size // model_ranks
    return {**_micro_batch(config, replicas, model_ranks), **_factors(config, replicas)}


def _micro_batch(config: RunConfig, replicas: int, model_ranks: int) -> dict[str, int]:
    data = config.data
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


def _factors(config: RunConfig, replicas: int) -> dict[str, int]:
    """Fit numbers; the words `node`, `all` and `auto` fit themselves."""
    changed, limit = {}, replicas
    for name in ("optimizer", "grads", "params"):
        wanted = getattr(config.sharding, name)
        if isinstance(wanted, int):
            fitted = max(d for d in divisors(limit) if d <= wanted)
            if fitted != wanted:
                changed[f"sharding.{name}"] = fitted
            limit = fitted
    return changed


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
