"""The rules that span sections: what must divide what for a model to be cut over ranks.

Each rule is one function that raises `ConfigError`; `check` runs them in an order in which the
first failure is the one to mend first.
"""

import math
from fractions import Fraction

from frontier_llm.config.family import check_decoder_length, check_family
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.reading import check_reading
from frontier_llm.config.run import RunConfig
from frontier_llm.config.support import check_support
from frontier_llm.errors import ConfigError


def check(config: RunConfig, world_size: int) -> None:
    """Refuse a configuration that cannot be laid out over `world_size` ranks.

    Raises:
        ConfigError: naming the key to change.
    """
    _check_world(config, world_size)
    check_family(config.model)
    _check_tensor(config)
    _check_pipeline(config)
    _check_sequence(config)
    check_decoder_length(config)
    _check_batch(config, world_size)
    check_reading(config)
    _check_positions(config)
    _check_schedule(config)
    _check_links(config)
    check_support(config)


def data_size(config: RunConfig, world_size: int) -> int:
    """Number of data-parallel replicas that remain beside tensor and pipeline ranks."""
    return world_size // (config.parallel.tensor * config.parallel.pipeline)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _largest_divisor(number: int, limit: int, multiple: int = 1) -> int:
    """Find the largest divisor up to `limit` that is a multiple of `multiple`."""
    return max(d for d in range(multiple, limit + 1, multiple) if number % d == 0)


def _check_world(config: RunConfig, world_size: int) -> None:
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    if world_size % (tensor * pipeline):
        wanted = -(-world_size // (tensor * pipeline)) * tensor * pipeline
        raise ConfigError(
            "parallel.tensor x parallel.pipeline",
            f"{tensor} x {pipeline} = {tensor * pipeline} on {world_size} ranks",
            "a divisor of the number of ranks; the rest is data parallelism",
            f"start {wanted} ranks (launch.ranks={wanted} on one machine), or choose factors of "
            f"{world_size}: {_divisors(world_size)}",
        )
    per_node = config.launch.ranks_per_node
    if per_node is not None and per_node < world_size and world_size % per_node:
        raise ConfigError(
            "launch.ranks_per_node",
            f"{per_node} for {world_size} ranks",
            "nodes of equal size: a divisor of the number of ranks",
            f"set launch.ranks_per_node={_largest_divisor(world_size, per_node)}; all divisors: "
            f"{_divisors(world_size)}",
        )


def _next_heads(model: ModelConfig, tensor: int) -> int:
    """Find the next number of heads that tensor ranks divide and, if there is one, the width."""
    first = -(-model.heads // tensor) * tensor
    return next((h for h in range(first, model.hidden + 1, tensor) if model.hidden % h == 0), first)


def _check_tensor(config: RunConfig) -> None:
    tensor, model = config.parallel.tensor, config.model
    for key, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if size % tensor:
            fitting = _next_heads(model, tensor) if key == "heads" else -(-size // tensor) * tensor
            raise ConfigError(
                f"model.{key}",
                f"{size}, cut over parallel.tensor={tensor}",
                f"a multiple of parallel.tensor ({tensor})",
                f"set model.{key}={fitting}, or parallel.tensor to a divisor of {size}",
            )
    if model.heads % model.kv_heads:
        raise ConfigError(
            "model.kv_heads",
            model.kv_heads,
            f"a divisor of model.heads ({model.heads}): each serves an equal group of queries",
            f"set model.kv_heads={_largest_divisor(model.heads, model.kv_heads, tensor)}; all "
            f"divisors: {_divisors(model.heads)}",
        )
    # a head_dim that does not follow from the others was set on purpose
    if model.hidden % model.heads and model.head_dim == max(1, model.hidden // model.heads):
        raise ConfigError(
            "model.heads",
            f"{model.heads} for model.hidden={model.hidden}",
            "a divisor of model.hidden, unless model.head_dim is given",
            f"set model.hidden={-(-model.hidden // model.heads) * model.heads}, or model.heads to "
            f"one of {_divisors(model.hidden)}, or model.head_dim",
        )


def _check_pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.model.layers
    pieces = parallel.pipeline * parallel.chunks
    if parallel.chunks > 1 and parallel.pipeline == 1:
        raise ConfigError(
            "parallel.chunks",
            parallel.chunks,
            "1 when there is no pipeline: chunks interleave the stages of one",
            "set parallel.chunks=1, or parallel.pipeline to 2 or more",
        )
    if pieces > layers:
        raise ConfigError(
            "parallel.pipeline x parallel.chunks",
            f"{parallel.pipeline} x {parallel.chunks} = {pieces} pieces",
            f"at most one piece a layer: model.layers is {layers}",
            f"lower parallel.pipeline or parallel.chunks, or set model.layers={pieces}",
        )
    split = parallel.layers_per_stage
    if split is None:
        return
    if len(split) != pieces or sum(split) != layers or min(split) < 1:
        raise ConfigError(
            "parallel.layers_per_stage",
            f"{list(split)} ({len(split)} numbers, sum {sum(split)})",
            f"{pieces} numbers of at least 1 (parallel.pipeline x parallel.chunks) whose sum is "
            f"model.layers ({layers})",
            "set parallel.layers_per_stage=null for an even cut, or give one number for each "
            "piece, in the model's order",
        )


def _check_sequence(config: RunConfig) -> None:
    parallel, length = config.parallel, config.data.sequence_length
    if parallel.sequence and length % parallel.tensor:
        raise ConfigError(
            "data.sequence_length",
            f"{length}, cut over parallel.tensor={parallel.tensor} by parallel.sequence=true",
            f"a multiple of {parallel.tensor}",
            f"set data.sequence_length={-(-length // parallel.tensor) * parallel.tensor}, or "
            "parallel.sequence=false",
        )


def _check_batch(config: RunConfig, world_size: int) -> None:
    data, parallel = config.data, config.parallel
    replicas = data_size(config, world_size)
    together = replicas * data.micro_batch
    if data.global_batch % together:
        raise ConfigError(
            "data.global_batch",
            f"{data.global_batch} on {replicas} data-parallel replicas with "
            f"data.micro_batch={data.micro_batch}",
            f"a multiple of {replicas} x {data.micro_batch} = {together}",
            f"set data.global_batch={-(-data.global_batch // together) * together}, or another "
            "data.micro_batch",
        )
    micro_batches = data.global_batch // together
    if parallel.chunks > 1 and micro_batches % parallel.pipeline:
        step = together * parallel.pipeline
        raise ConfigError(
            "data.global_batch",
            f"{data.global_batch}, which is {micro_batches} micro-batches a replica",
            f"with parallel.chunks > 1, micro-batches in multiples of parallel.pipeline "
            f"({parallel.pipeline})",
            f"set data.global_batch={-(-data.global_batch // step) * step}",
        )


def _check_positions(config: RunConfig) -> None:
    model = config.model
    rotated = int(model.head_dim * model.rotary_fraction)
    if model.positions == "rotary" and not _is_rotatable(rotated):
        wider = _next_rotatable(rotated, Fraction(model.rotary_fraction))
        raise ConfigError(
            "model.head_dim",
            f"{model.head_dim}, of which {rotated} are rotated",
            "an even number of rotated dimensions, 2 or more: they turn in pairs",
            f"set model.head_dim={wider}, or another model.rotary_fraction "
            f"({model.rotary_fraction})",
        )


def _is_rotatable(dimensions: int) -> bool:
    return dimensions >= 2 and dimensions % 2 == 0


def _next_rotatable(rotated: int, share: Fraction) -> int:
    """Find the least head_dim of which more than `rotated` dimensions, an even number, turn."""
    wanted = max(2, rotated + 1)
    wider = math.ceil(wanted / share)
    # in floating point, as the model counts, one less may round up to enough
    return wider - (float((wider - 1) * share) >= wanted)


def _check_schedule(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        raise ConfigError(
            "optimizer.minimum_learning_rate",
            optimizer.minimum_learning_rate,
            f"at most optimizer.learning_rate ({optimizer.learning_rate})",
            f"set optimizer.minimum_learning_rate={optimizer.learning_rate} or less: the schedule "
            "decays from the one to the other",
        )


def _check_links(config: RunConfig) -> None:
    ranks = [link.ranks for link in config.cluster.links]
    sizes = [size for size in ranks[:-1] if size is not None]
    ordered = len(sizes) == len(ranks) - 1 and sizes == sorted(set(sizes))
    if ranks[-1] is not None or not ordered:
        raise ConfigError(
            "cluster.links",
            f"{config.cluster.name} with ranks "
            + ", ".join("null" if size is None else str(size) for size in ranks),
            "links nearest first, each shared by more ranks than the one before; the last, and no "
            "other, has `ranks: null`",
            f"mend the links in conf/cluster/{config.cluster.name}.yaml",
        )
