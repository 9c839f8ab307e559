"""Check the rules of the optimizer and of checkpoints, and those that concern several sections.

Most rules say that a number of ranks must divide a size. Each rule is one function that raises
`ConfigError`. `check` runs the rules in the order in which errors should be corrected.
"""

import math
from fractions import Fraction

from frontier_llm.config.family import (
    check_attention,
    check_family,
    fitting_heads,
    is_rotatable,
    next_heads,
    next_hidden,
)
from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.config.reading import check_data
from frontier_llm.config.run import RunConfig
from frontier_llm.config.support import check_support
from frontier_llm.errors import ConfigError, refuse
from frontier_llm.units import counted


def check(config: RunConfig, world_size: int) -> None:
    """Refuse a configuration that cannot run on `world_size` ranks."""
    _check_world(config, world_size)
    check_family(config.model)
    check_attention(config)
    _check_precision(config)
    _check_deterministic(config)
    _check_context(config)
    _check_sides(config)
    _check_pipeline_schedule(config)
    _check_pipeline(config)
    _check_sequence(config)
    _check_batch(config, world_size)
    check_data(config)
    check_optimizer(config)
    check_checkpoint(config)
    _check_links(config)
    check_support(config)


def data_size(config: RunConfig, world_size: int) -> int:
    """Return the number of replicas, which read different samples."""
    return world_size // config.parallel.ranks_per_replica


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def largest_divisor(number: int, limit: int, multiple: int = 1) -> int:
    """Return the largest divisor of `number` up to `limit` that is a multiple of `multiple`."""
    return max(d for d in range(multiple, limit + 1, multiple) if number % d == 0)


def _check_world(config: RunConfig, world_size: int) -> None:
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    context, data_ranks = config.parallel.context_ranks, world_size // (tensor * pipeline)
    if world_size % (tensor * pipeline):
        next_size = -(-world_size // (tensor * pipeline)) * tensor * pipeline
        raise ConfigError(
            "parallel.tensor x parallel.pipeline",
            f"{tensor} x {pipeline} = {tensor * pipeline} on {world_size} ranks",
            "a product that divides the number of ranks; the quotient is the number of replicas",
            f"start {next_size} ranks (launch.ranks={next_size} on one machine), or choose factors "
            f"of {world_size}: {_divisors(world_size)}{_fewer_stages(config, world_size)}",
        )
    if data_ranks % context:
        needed = tensor * pipeline * context
        raise ConfigError(
            "parallel.context",
            f"{context} on {data_ranks} data ranks",
            "a divisor of the data ranks, which are the ranks divided by parallel.tensor x "
            "parallel.pipeline",
            f"set parallel.context={largest_divisor(data_ranks, context)}"
            f"{_fewer_stages(config, world_size)}, or start a multiple of {needed} ranks "
            f"(launch.ranks={needed})",
        )
    per_node = config.launch.ranks_per_node
    if per_node is not None and per_node < world_size and world_size % per_node:
        raise ConfigError(
            "launch.ranks_per_node",
            f"{per_node} for {world_size} ranks",
            "a divisor of the number of ranks, so that nodes have equal sizes",
            f"set launch.ranks_per_node={largest_divisor(world_size, per_node)}; all divisors: "
            f"{_divisors(world_size)}",
        )


def _fewer_stages(config: RunConfig, world_size: int) -> str:
    """Advise the most stages with which the other axes divide the ranks; the default has two."""
    parallel = config.parallel
    others = parallel.tensor * parallel.context_ranks
    if parallel.pipeline == 1 or world_size % others:
        return ""
    limit = min(parallel.pipeline, world_size // others)
    return f", or set parallel.pipeline={largest_divisor(world_size // others, limit)}"


def _check_precision(config: RunConfig) -> None:
    name, device = config.precision.name, config.cluster.device
    supported = {**device.peak_tflops, **device.calibration.products}
    if name == "auto" or device.kind == "cpu" or name in supported or not supported:
        return
    preferred = next((other for other in ("bf16", "fp16") if other in supported), "fp32")
    raise ConfigError(
        "precision",
        f"{name} on cluster={config.cluster.name}",
        f"a format in which {device.name} computes: {', '.join(supported)}",
        f"set precision={preferred}; if the device can compute in {name}, add the speed of this "
        "format to the cluster file (frontier-llm calibrate measures it)",
    )


def _check_deterministic(config: RunConfig) -> None:
    if config.trainer.deterministic and config.kernels == "fastest":
        raise ConfigError(
            "kernels",
            "fastest, with trainer.deterministic=true",
            "a fixed implementation of the layers: fastest measures which one is faster, so two "
            "runs may choose different ones, which round differently",
            "set kernels=auto, elementwise or compiled, or trainer.deterministic=false",
        )


def _check_context(config: RunConfig) -> None:
    """Refuse what samples that are cut over ranks do not have."""
    context, length = config.parallel.context_ranks, config.data.sequence_length
    if context == 1:
        return
    model, refused = config.model, f", with parallel.context={context}"
    for key, got, is_possible, wants, todo in (
        ("model.kind", model.kind, model.kind == "gpt",
         "gpt: queries of an encoder, and those that read its output, need the keys of all ranks",
         "choose a GPT"),
        ("model.attention_dropout", model.attention_dropout, not model.attention_dropout,
         "0, because its masks would depend on the cut", "set model.attention_dropout=0"),
        ("attention", config.attention, config.attention == "sdpa",
         "sdpa, because FlexAttention reads the keys of one rank", "set attention=sdpa"),
        ("kernels", config.kernels, config.kernels != "compiled",
         "layers that are not compiled, because they exchange keys and values",
         "set kernels=auto"),
    ):  # fmt: skip
        if not is_possible:
            raise ConfigError(key, f"{got}{refused}", wants, f"{todo}, or parallel.context=1")
    multiple = 2 * context * (config.parallel.tensor if config.parallel.sequence else 1)
    if length % multiple:
        raise ConfigError(
            "data.sequence_length",
            f"{length}{refused}",
            f"a multiple of {multiple}, because each context rank has two equal ranges of tokens"
            f"{', which tensor ranks divide' if config.parallel.sequence else ''}",
            f"set data.sequence_length={-(-length // multiple) * multiple}, or parallel.context=1",
        )


def _check_sides(config: RunConfig) -> None:
    """Check the dimensions of the decoder, and those of an encoder that has others."""
    sides, encoder = [(config, "")], config.model.encoder
    if encoder is not config.model:
        sides.append((config.model_copy(update={"model": encoder}), "encoder_"))
    for side, prefix in sides:
        _check_tensor(side, f"model.{prefix}")
        _check_positions(side, f"model.{prefix}")


def _check_tensor(config: RunConfig, section: str) -> None:
    tensor, model = config.parallel.tensor, config.model
    for key, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if size % tensor:
            fitting = next_heads(config) if key == "heads" else -(-size // tensor) * tensor
            raise ConfigError(
                f"{section}{key}",
                f"{size}, with parallel.tensor={tensor}",
                f"a multiple of parallel.tensor ({tensor})",
                f"set {section}{key}={fitting}, or parallel.tensor to a divisor of {size}",
            )
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"{section}kv_heads",
            model.kv_heads,
            f"a divisor of {section}heads ({model.heads}), so that each key head serves equally "
            "many query heads",
            f"set {section}kv_heads={largest_divisor(model.heads, model.kv_heads, tensor)}; all "
            f"divisors: {_divisors(model.heads)}",
        )
    # If head_dim is not hidden / heads, the user has set it, and hidden need not be a multiple.
    if model.hidden % model.heads and model.head_dim == max(1, model.hidden // model.heads):
        heads = ", ".join(map(str, fitting_heads(config)))
        raise ConfigError(
            f"{section}heads",
            f"{model.heads} for {section}hidden={model.hidden}",
            f"a divisor of {section}hidden, unless {section}head_dim is given",
            f"set {section}hidden={next_hidden(config)}, "
            + (f"or {section}heads to one of {heads}, " if heads else "")
            + f"or {section}head_dim",
        )


def _check_pipeline_schedule(config: RunConfig) -> None:
    parallel = config.parallel
    name, chunks = parallel.schedule, parallel.chunks
    refuse(  # chunks first, because several of them also choose a schedule
        (chunks > 1 and parallel.pipeline == 1, "parallel.chunks", chunks,
         "1 if parallel.pipeline is 1, because only the stages of a pipeline can be interleaved",
         "set parallel.chunks=1, or parallel.pipeline to 2 or more"),
        (parallel.pipeline == 1 and name not in ("auto", "1f1b"), "parallel.schedule",
         f"{name}, with parallel.pipeline=1",
         "auto or 1f1b if parallel.pipeline is 1, because schedules differ only in when stages "
         "wait for each other", "set parallel.schedule=auto, or parallel.pipeline to 2 or more"),
    )  # fmt: skip
    fitting = {"1f1b": (1,), "zb_h1": (1,), "zb_v": (2,), "v_half": (2,)}
    is_fitting = chunks > 1 if name == "interleaved" else chunks in fitting.get(name, (chunks,))
    if not is_fitting:
        (wanted,) = fitting.get(name, (2,))
        raise ConfigError(
            "parallel.chunks",
            f"{chunks}, with parallel.schedule={name}",
            f"{wanted}{' or more' if name == 'interleaved' else ''} model chunks per stage",
            f"set parallel.chunks={wanted}, or parallel.schedule=auto",
        )
    _check_split(config)


def _check_split(config: RunConfig) -> None:
    """Check that linear layers can compute the gradients of weights later, if they have to.

    Some schedules always split backward passes. With the others `parallel.waiting_weights`, the
    number of weight gradients of a stage that may wait, splits them if it is positive.
    """
    parallel = config.parallel
    if parallel.pipeline == 1:  # one stage never waits, and does not split
        return
    if parallel.schedule in ("zb_h1", "zb_v", "v_half"):
        key = f"parallel.schedule={parallel.schedule}"
    elif parallel.waiting_weights not in ("auto", 0):
        key = f"parallel.waiting_weights={parallel.waiting_weights}"
    else:
        return
    wants = "if the gradients of weights are computed apart from those of inputs"
    refuse(
        (not config.sharding.fused_gradients, "sharding.fused_gradients", f"false, with {key}",
         f"true {wants}, because autograd alone computes both at once",
         "set sharding.fused_gradients=true, or parallel.schedule=auto and "
         "parallel.waiting_weights=0"),
        (config.kernels == "compiled", "kernels", f"compiled, with {key}",
         f"layers that are not compiled {wants}",
         "set kernels=auto, or parallel.schedule=auto and parallel.waiting_weights=0"),
    )  # fmt: skip


def _check_pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.model.layers
    chunks, split = parallel.pipeline * parallel.chunks, parallel.layers_per_stage
    refuse(
        (chunks > layers and split in (None, "auto"), "parallel.pipeline x parallel.chunks",
         f"{parallel.pipeline} x {parallel.chunks} = {chunks} model chunks",
         f"at most one model chunk per layer: model.layers is {layers}",
         f"lower parallel.pipeline or parallel.chunks, or set model.layers={chunks}"),
    )  # fmt: skip
    if split is None or split == "auto":
        return
    has_empty = any(n < 0 for n in split) or 0 in split[1:-1]
    if len(split) != chunks or sum(split) != layers or has_empty:
        raise ConfigError(
            "parallel.layers_per_stage",
            f"{list(split)} ({len(split)} numbers, sum {sum(split)})",
            f"{chunks} numbers (parallel.pipeline x parallel.chunks) whose sum is model.layers "
            f"({layers}), each at least 1, but the first and the last may be 0",
            "set parallel.layers_per_stage=null for an even split or auto, or give one number per "
            "model chunk, in the order of the model",
        )


def _check_sequence(config: RunConfig) -> None:
    parallel, length = config.parallel, config.data.sequence_length
    tensor, with_sequence = parallel.tensor, "parallel.sequence=true"
    if not parallel.sequence:
        return
    refuse(
        (length % tensor, "data.sequence_length",
         f"{length}, with parallel.tensor={tensor} and {with_sequence}", f"a multiple of {tensor}",
         f"set data.sequence_length={-(-length // tensor) * tensor}, or parallel.sequence=false"),
        (config.model.kind == "t5" and DECODER_MULTIPLE % tensor, "parallel.tensor",
         f"{tensor}, with {with_sequence} and an encoder-decoder",
         f"a divisor of {DECODER_MULTIPLE}: the length of the decoder is a multiple of "
         f"{DECODER_MULTIPLE}", "set parallel.sequence=false, or parallel.tensor to 1, 2, 4 or 8"),
    )  # fmt: skip


def _check_batch(config: RunConfig, world_size: int) -> None:
    data, parallel = config.data, config.parallel
    replicas = data_size(config, world_size)
    multiple = replicas * data.micro_batch
    samples, rest = divmod(data.global_batch, replicas)
    fits = 0 if rest else math.gcd(samples, data.micro_batch)
    if data.global_batch % multiple:
        raise ConfigError(
            "data.global_batch",
            f"{data.global_batch} on {replicas} data-parallel replicas with "
            f"data.micro_batch={data.micro_batch}",
            f"a multiple of the {replicas} replicas"
            if rest
            else f"a multiple of {replicas} x {data.micro_batch} = {multiple}",
            f"set data.global_batch={-(-data.global_batch // multiple) * multiple}"
            + (f", or data.micro_batch={fits}" if fits else _other_ranks(config, replicas)),
        )
    micro_batches = data.global_batch // multiple
    if parallel.chunks > 1 and micro_batches < parallel.pipeline:
        raise ConfigError(
            "data.global_batch",
            f"{data.global_batch}, which is {micro_batches} micro-batches per replica",
            f"with parallel.chunks > 1, at least parallel.pipeline ({parallel.pipeline}) "
            "micro-batches per replica",
            f"set data.global_batch={multiple * parallel.pipeline}",
        )


def _other_ranks(config: RunConfig, replicas: int) -> str:
    """Say how many fewer ranks, on whole nodes if there are several, divide the global batch."""
    per_replica = config.parallel.ranks_per_replica
    per_node = config.launch.ranks_per_node or config.cluster.ranks_per_node
    for ranks in range((replicas - 1) * per_replica, 0, -per_replica):
        rest = config.data.global_batch % (ranks // per_replica * config.data.micro_batch)
        if rest == 0 and (ranks < per_node or ranks % per_node == 0):
            return f", or start {counted(ranks, 'rank')} and keep the batch"
    return ""


def _check_positions(config: RunConfig, section: str) -> None:
    model = config.model
    rotated = model.rotated_width
    if model.positions == "rotary" and not is_rotatable(rotated):
        head_dim = _next_rotatable(rotated, Fraction(model.rotary_fraction))
        raise ConfigError(
            f"{section}head_dim",
            f"{model.head_dim}, with {rotated} rotated dimensions",
            "an even number of rotated dimensions (2 or more), because they are rotated in pairs",
            f"set {section}head_dim={head_dim}, or another model.rotary_fraction "
            f"({model.rotary_fraction})",
        )


def _next_rotatable(rotated: int, share: Fraction) -> int:
    """Return the smallest head_dim with an even number of rotated dimensions above `rotated`.

    `rotated` is odd or less than 2. `share` is model.rotary_fraction.
    """
    needed = max(2, rotated + 1)
    head_dim = math.ceil(needed / share)
    # _check_positions multiplies in floating point, so head_dim - 1 is enough if its product is
    # rounded up to `needed`.
    return head_dim - (float((head_dim - 1) * share) >= needed)


def _check_links(config: RunConfig) -> None:
    ranks = [link.ranks for link in config.cluster.links]
    inner = [size for size in ranks[:-1] if size is not None]
    is_ascending = len(inner) == len(ranks) - 1 and inner == sorted(set(inner))
    if ranks[-1] is not None or not is_ascending:
        raise ConfigError(
            "cluster.links",
            f"{config.cluster.name} with ranks "
            + ", ".join("null" if size is None else str(size) for size in ranks),
            "links from the nearest to the farthest, where each link connects more ranks than the "
            "previous one and only the last link has `ranks: null`",
            f"correct the links in conf/cluster/{config.cluster.name}.yaml",
        )


def check_optimizer(config: RunConfig) -> None:
    """Refuse settings of the optimizer that contradict each other."""
    optimizer = config.optimizer
    _check_cooldown(config)
    _check_timescale(config)
    steps, found = optimizer.cross_attention_steps, (optimizer.name, config.model.kind)
    refuse(
        (optimizer.minimum_learning_rate > optimizer.learning_rate,
         "optimizer.minimum_learning_rate", optimizer.minimum_learning_rate,
         f"at most optimizer.learning_rate ({optimizer.learning_rate})",
         f"set optimizer.minimum_learning_rate={optimizer.learning_rate} or less: the schedule "
         "decays to it"),
        (steps and found != ("adamw", "t5"), "optimizer.cross_attention_steps",
         f"{steps}, with optimizer.name={found[0]} and model.kind={found[1]}",
         "0, unless AdamW trains an encoder-decoder: other optimizers update all parameters",
         "set optimizer.cross_attention_steps=0, or optimizer=adamw and an encoder-decoder"),
        (steps and config.model.cross_attention == "merged", "optimizer.cross_attention_steps",
         f"{steps}, with model.cross_attention=merged",
         "0: merged attention has no weights for the encoder's output alone",
         "set optimizer.cross_attention_steps=0"),
    )  # fmt: skip


def _check_cooldown(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.schedule != "wsd":
        return
    if optimizer.cooldown_steps is not None and optimizer.cooldown_share is not None:
        raise ConfigError(
            "optimizer.cooldown_share",
            f"{optimizer.cooldown_share}, with optimizer.cooldown_steps={optimizer.cooldown_steps}",
            "the length of the cooldown either in steps or as a share of the run",
            "set optimizer.cooldown_share=null, or optimizer.cooldown_steps=null",
        )
    warmup, end, cooldown = optimizer.warmup_steps, config.decay_steps, config.cooldown_steps
    # a run that ends within its warm-up has no cooldown, as it has no decay in other schedules
    if cooldown > end or (warmup < end and warmup + cooldown > end):
        limit = max(1, end - warmup)
        in_steps = optimizer.cooldown_steps is not None
        key = "optimizer.cooldown_steps" if in_steps else "optimizer.cooldown_share"
        raise ConfigError(
            key,
            f"a cooldown of {cooldown} steps after a warm-up of {warmup}",
            f"both phases within the {end} steps until the end of the schedule "
            "(optimizer.decay_steps, or else trainer.steps)",
            f"set optimizer.cooldown_steps={limit}"
            + ("" if in_steps else " and optimizer.cooldown_share=null")
            + ", or a smaller optimizer.warmup_steps",
        )


def _check_timescale(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.schedule != "inverse_sqrt":
        return
    timescale, warmup = optimizer.timescale_steps, optimizer.warmup_steps
    refuse(
        (timescale is None and warmup == 0, "optimizer.timescale_steps",
         "null, with optimizer.warmup_steps=0",
         "the step from which on the learning rate falls, if there is no warm-up",
         "set optimizer.timescale_steps=10000 (as T5 does), or optimizer.warmup_steps=4000"),
        (timescale is not None and timescale < warmup, "optimizer.timescale_steps", timescale,
         f"at least optimizer.warmup_steps ({warmup}): the learning rate falls after the "
         "warm-up", f"set optimizer.timescale_steps={warmup}"),
    )  # fmt: skip


def check_checkpoint(config: RunConfig) -> None:
    """Refuse reduced moments where no checkpoint would have them."""
    checkpoint, optimizer = config.checkpoint, config.optimizer.name
    local, moments = checkpoint.tiers.local, checkpoint.moments
    if moments == "fp32" or checkpoint.mode == "off":
        return
    exact = "set checkpoint.moments=fp32"
    refuse(
        (optimizer != "adamw", "checkpoint.moments", f"{moments}, with optimizer.name={optimizer}",
         "fp32, because only AdamW has two moments in fp32 per parameter",
         f"{exact}, or optimizer=adamw"),
        (local.path is None, "checkpoint.moments", f"{moments}, without node-local checkpoints",
         "a directory on the nodes' disks: checkpoints of the run directory are exact",
         f"set checkpoint.tiers.local.path, or {exact}"),
        (checkpoint.partner, "checkpoint.moments", f"{moments}, with checkpoint.partner=true",
         "fp32, because checkpoints that are copied to the next node are exact",
         f"{exact}, or checkpoint.partner=false"),
        (local.every_steps % checkpoint.every_steps == 0, "checkpoint.moments",
         f"{moments}, with checkpoint.tiers.local.every_steps={local.every_steps} and "
         f"checkpoint.every_steps={checkpoint.every_steps}",
         "local checkpoints that are not copied to the run directory: those that are copied are "
         "exact",
         f"set a smaller checkpoint.tiers.local.every_steps or a larger checkpoint.every_steps, "
         f"or {exact}"),
    )  # fmt: skip
