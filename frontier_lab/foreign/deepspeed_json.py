"""Read a DeepSpeed configuration (JSON), and the config.json of its Hugging Face model.

Names and default values are those of DeepSpeed's page "DeepSpeed Configuration JSON".
"""

from collections.abc import Mapping
from typing import Any

from frontier_lab.foreign.foreign_run import AUTO, ForeignRun, Reading, flat, written
from frontier_lab.foreign.megatron_arguments import zero_factors
from frontier_llm.errors import ConfigError, DataError

KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""Keys of which a DeepSpeed configuration has at least one."""
IGNORED = """
    _* comment*
    activation_checkpointing.profile aio* autotuning* bf16.check* bf16.loss_scale* checkpoint*
    comet* comms_logger* compression_training* csv_monitor* data_efficiency* dump_state
    elasticity* flops_profiler* fp16.auto_cast fp16.consecutive_hysteresis fp16.hysteresis
    fp16.initial_scale_power fp16.loss_scale* fp16.min_loss_scale fp8.* gradient_clipping
    gradient_predivide_factor memory_breakdown monitor* nebula* optimizer.* prescale_gradients
    scheduler.* seed sparse_gradients steps_per_print tensorboard* wall_clock_breakdown wandb*
    zero.allgather_partitions zero.contiguous_gradients zero.elastic_checkpoint
    zero.ignore_unused_parameters zero.legacy* zero.load_from_fp32_weights zero.log_trace*
    zero.offload_* zero.reduce_scatter zero.round_robin_gradients zero.stage3_gather*
    zero.sub_group_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
""".split()
"""Patterns of keys that influence neither time nor memory of a step; `zero.` stands for
`zero_optimization.`."""
_OFFLOAD = "zero.offload_optimizer.device zero.offload_param.device zero.zenflow"
_CPU_OFFLOAD = "zero.cpu_offload zero.cpu_offload_params zero.cpu_offload_param"
_BUFFERS = (
    "zero.allgather_bucket_size zero.stage3_prefetch_bucket_size zero.stage3_max_live_parameters "
    "zero.stage3_max_reuse_distance zero.stage3_param_persistence_threshold "
    "zero.stage3_module_granularity_threshold "
    "activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing"
)


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Return whether the content of a JSON file is a DeepSpeed configuration."""
    return bool(KEYS & values.keys())


def read_deepspeed(
    content: Mapping[str, Any],
    model: Mapping[str, Any] | None,
    where: str,
    given: Mapping[str, str],
    ranks: int | None,
) -> ForeignRun:
    """Translate a configuration; `model` is the content of config.json."""
    run = ForeignRun("DeepSpeed", "deepspeed", "", ranks)
    run.search = ("planner.tensor=[1]", "planner.pipeline=[1]")
    run.keys |= {"planner.engine": "deepspeed", "parallel.schedule": "1f1b", "recompute": "none"}
    short = {key.replace("zero_optimization.", "zero."): value for key, value in flat(content)}
    spell = lambda name: name.replace("zero.", "zero_optimization.")  # noqa: E731
    reading = Reading(run, where, short, given, spell)
    offload = "the planner keeps all states on the device, and counts no transfers to the host"
    reading.refuse_if(f"{_OFFLOAD} {_CPU_OFFLOAD}", offload, "none")
    reading.refuse_if("sparse_attention.mode", "the planner counts dense attention only")
    _model(reading, model)
    _batches(reading)
    fp16, bf16 = reading.flag("fp16.enabled"), reading.flag("bf16.enabled")
    if fp16 and bf16:
        raise reading.refused("fp16.enabled", "one of bf16.enabled and fp16.enabled", "drop one")
    bf16 |= reading.flag("fp8.enabled") and not fp16
    reading.nearly("fp8.enabled", "planned in 16 bits, so it may be faster")
    is_auto = AUTO in (reading.values.get("bf16.enabled"), reading.values.get("fp16.enabled"))
    precision = None if is_auto else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    reading.means("bf16.enabled fp16.enabled", {"precision": precision})
    reading.optimizer("optimizer.type", "AdamW")
    _zero(reading)
    reading.nearly(_BUFFERS, "not planned", AUTO)
    if "recompute" not in given:
        note = "whether the model recomputes activations is not in this file: recompute=none is"
        run.notes.append(f"{note} planned; gradient_checkpointing is recompute=full")
    if "data.sequence_length" not in given:
        run.missing["data.sequence_length"] = "a DeepSpeed file has no length of samples"
    return reading.finish(IGNORED)


def _model(reading: Reading, model: Mapping[str, Any] | None) -> None:
    if model is None:
        if "model" not in reading.given:
            reason = "not in a DeepSpeed file: a model of conf/model, or --model-config config.json"
            reading.run.missing["model"] = reason
        return
    from frontier_lab.convert.families import model_settings  # imports torch

    name = str(model.get("model_type"))
    try:
        base, settings = model_settings(dict(model))
    except DataError as error:
        wants = f"a model that this program can train: {str(error).splitlines()[0]}"
        todo = "give another model, or model=NAME of conf/model"
        raise ConfigError("--model-config", name, wants, todo) from None
    keys = {key: value for key, value in settings.items() if key.startswith("model.")}
    reading.run.keys |= {"model": base, "model.name": f"hf_{name}"}
    reading.run.keys |= {key: written(value) for key, value in keys.items()}
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    shown = [f"{name}={keys.get(f'model.{name}')}" for name in sizes]
    reading.run.rows.append(("config.json", name, f"model: {' '.join(shown)}"))


def _batches(reading: Reading) -> None:
    run, sizes = reading.run, list[int]()
    for name in ("tensor", "pipeline", "context", "chunks"):
        theirs = "tensor_parallel.autotp_size" if name == "tensor" else ""
        sizes.append(reading.integer(theirs, 1, f"parallel.{name}"))
        run.keys[f"parallel.{name}"] = str(sizes[-1])
    reading.means("tensor_parallel.autotp_size", {"parallel.tensor": sizes[0]})
    micro = reading.integer("train_micro_batch_size_per_gpu", None, "data.micro_batch")
    batch = reading.integer("train_batch_size", None, "data.global_batch")
    steps = reading.integer("gradient_accumulation_steps")
    both = "train_batch_size gradient_accumulation_steps"  # one decides if the other is `auto`
    decides = "train_batch_size" if batch else "gradient_accumulation_steps" if steps else both
    if run.ranks is None and micro and batch and steps and batch % (micro * steps) == 0:
        run.ranks = batch // micro // steps * sizes[0] * sizes[1] * sizes[2]
        run.notes.append(f"the batch sizes are those of {run.ranks} GPUs")
    data = reading.data_ranks(*sizes[:3])
    replicas = data and data // sizes[2]
    if replicas:
        micro = micro or (batch and batch // (steps or 1) // replicas) or None
        batch = batch or (micro and micro * (steps or 1) * replicas)
        if micro and steps and micro * steps * replicas != batch:
            wants = (
                f"{micro} x {steps} accumulated x {replicas} data ranks, {micro * steps * replicas}"
            )
            todo = "correct one of them, or give the ranks, such as launch.ranks=64"
            raise reading.refused("train_batch_size", wants, todo)
    reading.means("train_micro_batch_size_per_gpu", {"data.micro_batch": micro})
    reading.means(decides, {"data.global_batch": batch})


def _zero(reading: Reading) -> None:
    """Read the stage of ZeRO, its variants, and the formats of messages."""
    stage = reading.integer("zero.stage", 0, least=0)
    if stage == 0 and reading.run.keys.get("precision") == "bf16":
        stage = 1  # DeepSpeed's optimizer for bf16 always shards its states
    factors = zero_factors(stage, reading.run.program, "zero_optimization.stage")
    mics = reading.integer("zero.mics_shard_size", -1, least=-1)
    factors = dict.fromkeys(factors, mics) if mics > 0 else factors
    reading.means("zero.stage zero.mics_shard_size", factors)
    part = reading.integer("zero.zero_hpz_partition_size", 1)
    if part > 1 and stage == 3:
        keys = {"planner.engine.second_copy_ranks": part}
        reading.means("zero.zero_hpz_partition_size", keys)
    if reading.flag("zero.zero_quantized_weights"):
        reading.means("zero.zero_quantized_weights", {"collectives.params_format": "int8"})
    if reading.flag("zero.zero_quantized_gradients"):
        keys = {"collectives.grads_format": "int8", "collectives.grads_across_format": "int4"}
        reading.means("zero.zero_quantized_gradients", keys)
    else:
        words = {"fp32": "fp32", "fp16": "bf16", "bf16": "bf16", "bfp16": "bf16"}
        wire = reading.word("communication_data_type", words, "bf16")
        keys = {"collectives.grads_format": wire, "collectives.sums_format": wire}
        reading.means("communication_data_type", keys)
    if reading.get("data_types.grad_accum_dtype") is not None:
        sums = {"fp32": "4", "fp16": "2", "bf16": "2"}
        reading.choose("data_types.grad_accum_dtype", "planner.engine.sums_bytes", sums, "bf16")
    if reading.get("zero.overlap_comm") is not None:
        keys = {"planner.engine.overlaps": reading.flag("zero.overlap_comm")}
        reading.means("zero.overlap_comm", keys)
    bucket = reading.integer("zero.reduce_bucket_size")
    if bucket and stage < 3:
        reading.means("zero.reduce_bucket_size", {"planner.engine.message_elements": bucket})
