"""Read a DeepSpeed configuration (JSON), and the config.json of its Hugging Face model.

Names and default values are those of DeepSpeed's page "DeepSpeed Configuration JSON".
"""

from collections.abc import Mapping
from typing import Any

from frontier_lab.foreign.megatron_arguments import zero_factors
from frontier_lab.foreign.reading import ForeignRun, Reading, flat, written
from frontier_llm.errors import ConfigError, DataError

KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""Keys of which a DeepSpeed configuration has at least one."""
ZERO = "zero_optimization"
IGNORED = (
    "steps_per_print", "wall_clock_breakdown", "gradient_clipping", "prescale_gradients",
    "optimizer.*", "scheduler.*", "tensorboard*", "wandb*", "csv_monitor*", "comet*", "flops_profiler*",
    "comms_logger*", "dump_state", "memory_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "fp16.loss_scale*", "fp16.initial_scale_power", "fp16.hysteresis",
    "fp16.min_loss_scale", "fp16.consecutive_hysteresis", "fp16.auto_cast", "monitor*", "checkpoint*",
    "gradient_predivide_factor", "sparse_gradients", "seed", "data_efficiency*", "elasticity*", "nebula*",
    "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions", "zero_optimization.round_robin_gradients",
    "zero_optimization.stage3_gather*", "zero_optimization.ignore_unused_parameters",
    "zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint",
    "zero_optimization.sub_group_size", "zero_optimization.log_trace*",
    "activation_checkpointing.profile", "zero_optimization.legacy*", "compression_training*",
    "bf16.check*", "bf16.loss_scale*", "aio*", "autotuning*",
)  # fmt: skip
"""Patterns of keys that influence neither time nor memory of a step."""
MODEL_IGNORED = ("data.sequence_length", "attention_dropout")


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
    run = ForeignRun("DeepSpeed", "deepspeed", "", search=("planner.tensor=[1]", "planner.pipeline=[1]"))
    reading = Reading(run, where, dict(flat(content)), given)
    run.ranks = ranks
    run.keys |= {"planner.engine": "deepspeed", "parallel.schedule": "1f1b"}
    for name in ("tensor", "pipeline", "context", "chunks"):
        run.keys[f"parallel.{name}"] = given.get(f"parallel.{name}", "1")
    offload = "the planner keeps all states on the device, and counts no transfers to the host"
    reading.refuse_if(f"{ZERO}.offload_optimizer.device {ZERO}.offload_param.device", offload, "none")
    reading.refuse_if(f"{ZERO}.cpu_offload {ZERO}.cpu_offload_params {ZERO}.zenflow", offload)
    reading.refuse_if("sparse_attention.mode", "the planner counts dense attention only")
    for name in list(reading.values):
        if name.startswith((f"{ZERO}.offload_", f"{ZERO}.cpu_offload")):
            reading.get(name)
    _model(reading, model)
    _batches(reading)
    fp16, bf16 = reading.flag("fp16.enabled"), reading.flag("bf16.enabled")
    bf16 = bf16 or reading.flag("bfloat16.enabled")
    names = "bf16.enabled fp16.enabled"
    opened = [n for n in names.split() if reading.values.get(n) == "auto"]
    precision = None if opened else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    reading.means(names, {"precision": precision})
    _zero(reading)
    run.keys["recompute"] = "none"
    if "recompute" not in given:
        note = "whether the model recomputes activations is not in this file: recompute=none is"
        run.notes.append(f"{note} planned; gradient_checkpointing is recompute=full")
    reading.nearly("activation_checkpointing.partition_activations "
                   "activation_checkpointing.cpu_checkpointing", "not planned")  # fmt: skip
    if "data.sequence_length" not in given:
        run.missing["data.sequence_length"] = "a DeepSpeed file has no length of samples"
    return reading.finish(IGNORED)


def _model(reading: Reading, model: Mapping[str, Any] | None) -> None:
    if model is None:
        if "model" not in reading.given:
            reading.run.missing["model"] = (
                "a DeepSpeed file has no model: give --model-config config.json, or a model of "
                "conf/model"
            )
        return
    from frontier_lab.convert.families import model_settings  # imports torch

    try:
        base, settings = model_settings(dict(model))
    except DataError as error:
        wants = "a model that this program can train: " + str(error).splitlines()[0]
        raise ConfigError("--model-config", model.get("model_type"), wants, "give another model, "
                          "or model=NAME of conf/model without --model-config") from None  # fmt: skip
    keys = {key: value for key, value in settings.items() if key not in MODEL_IGNORED}
    reading.run.keys |= {"model": base, "model.name": str(model.get("model_type"))}
    reading.run.keys |= {key: written(value) for key, value in keys.items()}
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    shown = " ".join(f"{name}={settings[f'model.{name}']}" for name in sizes
                     if settings.get(f"model.{name}") is not None)  # fmt: skip
    reading.run.rows.append(("config.json", str(model.get("model_type")), f"model: {shown}"))


def _batches(reading: Reading) -> None:
    micro = reading.integer("train_micro_batch_size_per_gpu", None, "data.micro_batch")
    batch = reading.integer("train_batch_size", None, "data.global_batch")
    steps = reading.integer("gradient_accumulation_steps")
    run = reading.run
    sizes = [int(run.keys[f"parallel.{name}"]) for name in ("tensor", "pipeline", "context")]
    model_ranks = sizes[0] * sizes[1] * sizes[2]
    if run.ranks is None and micro and batch and steps and batch % (micro * steps) == 0:
        run.ranks = batch // micro // steps * model_ranks
        run.notes.append(f"the batch sizes are those of {run.ranks} GPUs")
    data = reading.data_ranks(*sizes)
    replicas = data and data // sizes[2]
    if micro is None and batch and steps and replicas:
        micro = batch // steps // replicas or None
    if batch is None and micro and replicas:
        batch = micro * (steps or 1) * replicas
    if micro and batch and steps and replicas and micro * steps * replicas != batch:
        product = f"{micro} x {steps} accumulated x {replicas} data ranks = {micro * steps * replicas}"
        todo = "correct one of them, or give the ranks, such as launch.ranks=64"
        raise reading.refused("train_batch_size", product, todo)
    reading.means("train_micro_batch_size_per_gpu", {"data.micro_batch": micro})
    reading.means("train_batch_size gradient_accumulation_steps", {"data.global_batch": batch})


def _zero(reading: Reading) -> None:
    stage = reading.integer(f"{ZERO}.stage", 0, least=0)
    factors = zero_factors(stage, reading.run.program, f"{ZERO}.stage")
    mics = reading.integer(f"{ZERO}.mics_shard_size", -1, least=-1)
    if mics > 0:
        factors = dict.fromkeys(factors, mics)
    reading.means(f"{ZERO}.stage {ZERO}.mics_shard_size", factors)
    part = reading.integer(f"{ZERO}.zero_hpz_partition_size", 1)
    keys: dict[str, Any] = {}
    if part > 1 and stage == 3:
        keys["planner.engine.second_copy_ranks"] = part
    reading.means(f"{ZERO}.zero_hpz_partition_size", keys)
    weights = reading.flag(f"{ZERO}.zero_quantized_weights")
    if weights:
        reading.means(f"{ZERO}.zero_quantized_weights", {"collectives.params_format": "int8"})
    grads = reading.flag(f"{ZERO}.zero_quantized_gradients")
    formats = {"collectives.grads_format": "int8", "collectives.grads_across_format": "int4"}
    if grads:
        reading.means(f"{ZERO}.zero_quantized_gradients", formats)
    else:
        words = {"fp32": "fp32", "fp16": "bf16", "bf16": "bf16", "bfp16": "bf16"}
        kind = reading.word("communication_data_type", words, "fp16")
        reading.means("communication_data_type", {"collectives.grads_format": kind})
    kept = reading.word("data_types.grad_accum_dtype", {"fp32": "4", "fp16": "2", "bf16": "2"}, "bf16")
    if "data_types.grad_accum_dtype" in reading.values:
        reading.means("data_types.grad_accum_dtype", {"planner.engine.sums_bytes": kept})
    if f"{ZERO}.overlap_comm" in reading.values and reading.get(f"{ZERO}.overlap_comm") is not None:
        reading.means(f"{ZERO}.overlap_comm",
                      {"planner.engine.overlaps": reading.flag(f"{ZERO}.overlap_comm")})  # fmt: skip
    bucket = reading.integer(f"{ZERO}.reduce_bucket_size")
    if bucket and stage < 3:
        reading.means(f"{ZERO}.reduce_bucket_size", {"planner.engine.message_elements": bucket})
    reading.nearly(f"{ZERO}.allgather_bucket_size {ZERO}.stage3_prefetch_bucket_size "
                   f"{ZERO}.stage3_max_live_parameters {ZERO}.stage3_max_reuse_distance "
                   f"{ZERO}.stage3_param_persistence_threshold", "not planned", "auto")  # fmt: skip
