"""Read a torchtitan configuration (TOML).

Names and default values are those of torchtitan/config/job_config.py. Old names are read, too.
"""

import math
from collections.abc import Mapping
from typing import Any

from frontier_lab.foreign.foreign_run import ForeignRun, Reading
from frontier_llm.cli.group_files import file_values

SECTIONS = {"training", "parallelism", "activation_checkpoint", "job", "metrics"}
"""Sections of which a torchtitan file has at least two, besides [model]."""
FLAVORS = {
    ("llama3", "8B"): "llama3_8b",
    ("llama3", "70B"): "llama3_70b",
    ("llama3", "405B"): "llama3_405b",
    **{("qwen3", size): f"qwen3_{size.lower().replace('.', '_')}"
       for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
}  # fmt: skip
"""Files of conf/model by name and flavor of torchtitan's models."""
SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "GPipe": "1f1b",
    "ZBVZeroBubble": "zb_v",
}
"""Our schedule by theirs, as the functions get_schedule_class of torch accept them."""
_NEAREST = (
    "no runs of torchtitan were compared: the nearest engine is fsdp, whose published runs are of "
    "llm-foundry"
)
OLD = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    **{f"experimental.{name}": f"parallelism.{name}" for name in (
        "pipeline_parallel_degree", "pipeline_parallel_schedule", "context_parallel_degree",
        "enable_async_tensor_parallel")},
}  # fmt: skip
"""Names of 2024 and 2025, with those of today."""
IGNORED = """
    activation_checkpoint.early_stop activation_checkpoint.per_op_* checkpoint.* comm.*
    compile.backend compile.components debug.* experimental.custom_* fault_tolerance.* float8.*
    job.* lr_scheduler.* memory_estimation.* metrics.* model.hf_assets_path
    model.print_after_conversion model.tokenizer_path mx.* optimizer.beta* optimizer.eps
    optimizer.implementation optimizer.lr optimizer.weight_decay
    parallelism.context_parallel_rotate_method parallelism.disable_loss_parallel
    parallelism.expert_tensor_parallel_degree dataset.* model.norm_type
    activation_checkpoint.selective_ac_option profiling.* quantize.* training.data.*
    training.dataset* training.deterministic
    training.gc_* training.max_norm training.seed training.steps
    training.warmup_steps validation.*
""".split()
"""Patterns of keys that influence neither time nor memory of a step, or only through a converter of
the model, which is noted."""


def is_torchtitan(values: Mapping[str, Any]) -> bool:
    """Return whether the content of a TOML file is a torchtitan configuration."""
    return "model" in values and len(SECTIONS & values.keys()) >= 2


def read_job(
    values: Mapping[str, Any], where: str, given: Mapping[str, str], ranks: int | None
) -> ForeignRun:
    """Translate a job, given by dotted keys."""
    run = ForeignRun("torchtitan", "fsdp", _NEAREST, ranks)
    old = {new: name for name, new in OLD.items() if name in values and new not in values}
    values = {**values, **{new: values[name] for new, name in old.items()}}
    values = {name: value for name, value in values.items() if name not in old.values()}
    reading = Reading(run, where, values, given, lambda name: old.get(name, name))
    run.keys["planner.engine"] = "fsdp"
    dense = "the planner counts dense decoders only"
    reading.refuse_if("parallelism.expert_parallel_degree", dense, 1)
    offload = "the planner keeps optimizer states on the device"
    reading.refuse_if("training.enable_cpu_offload", offload)
    _model(reading)
    _layout(reading)
    kinds = {"none": "none", "full": "full", "selective": "selective", "memory_budget": "selective"}
    if reading.choose("activation_checkpoint.mode", "recompute", kinds, "selective") == "selective":
        option = reading.get("activation_checkpoint.selective_ac_option", "2")
        run.notes.append(
            f"activation_checkpoint.mode is selective (option {option}): planned as "
            "recompute=selective, which recomputes attention only; recompute=none and "
            "recompute=full are the bounds"
        )
    reading.optimizer("optimizer.name", "AdamW")
    reading.nearly("activation_checkpoint.memory_budget", "not used")
    reading.nearly("optimizer.early_step_in_backward", "planned with gradients kept until the step")
    reading.nearly("training.compile compile.enable", "the engine fsdp has the speed without it")
    reading.nearly("parallelism.enable_async_tensor_parallel", "the plan overlaps no messages "
                   "between tensor ranks")  # fmt: skip
    reading.nearly(
        "float8.enable_float8_linear model.converters", "planned in bf16, so it may be faster", []
    )
    return reading.finish(IGNORED)


def _model(reading: Reading) -> None:
    name, flavor = reading.get("model.name", "llama3"), reading.get("model.flavor", "debugmodel")
    model = FLAVORS.get((str(name), str(flavor)))
    if model is None and "model" not in reading.given:
        known = ", ".join(f"{each} {size}" for each, size in FLAVORS)
        wants = f"a dense model of which the sizes are known (not a {name}): {known}"
        todo = "give a dense model of conf/model in its place: model=NAME"
        raise reading.refused("model.flavor", wants, todo)
    reading.means("model.name model.flavor", {"model": model})
    reading.whole("training.seq_len", "data.sequence_length", 2048)
    words = {"bfloat16": "bf16", "float32": "fp32"}
    reading.choose("training.mixed_precision_param", "precision", words, "bfloat16")
    wire = "training.mixed_precision_reduce"
    reading.choose(wire, "collectives.grads_format", words, "float32")
    reading.nearly("training.dtype", "planned with master weights in fp32", "float32")


def _layout(reading: Reading) -> None:
    """Read degrees, schedule and batches; all degrees together give the number of ranks."""
    tensor = reading.whole("parallelism.tensor_parallel_degree", "parallel.tensor", 1)
    stages = reading.whole("parallelism.pipeline_parallel_degree", "parallel.pipeline", 1)
    context = reading.whole("parallelism.context_parallel_degree", "parallel.context", 1)
    replicate = reading.integer("parallelism.data_parallel_replicate_degree", 1)
    shard = reading.integer("parallelism.data_parallel_shard_degree", -1, least=-1)
    run, product = reading.run, tensor * stages * context * replicate * shard
    if shard >= 0:
        run.ranks = run.ranks or product
        if run.ranks != product or not product:
            wants = f"degrees whose product is the {run.ranks} ranks (they give {product})"
            todo = "set it to -1, or correct the other degrees or ranks"
            raise reading.refused("parallelism.data_parallel_shard_degree", wants, todo)
    data = reading.data_ranks(tensor, stages, context * replicate)
    run.keys["parallel.sequence"] = str(tensor > 1).lower()
    each = "all" if replicate == 1 else None if data is None else data // replicate
    policy = str(reading.get("parallelism.fsdp_reshard_after_forward", "default"))
    keeps = policy == "never" or (policy == "default" and stages > 1)
    factors = {"params": 1 if keeps else each, "grads": each, "optimizer": each}
    if shard == 1 and context == 1:
        factors = dict.fromkeys(factors, 1)
    reading.means(
        "parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree "
        "parallelism.fsdp_reshard_after_forward",
        {f"sharding.{name}": factor for name, factor in factors.items()},
    )
    _schedule(reading, stages)
    _batches(reading, stages, None if data is None else data // context)


def _schedule(reading: Reading, stages: int) -> None:
    name = "parallelism.pipeline_parallel_schedule"
    schedule = reading.word(name, SCHEDULES, "1F1B")
    each = reading.integer("parallelism.pipeline_parallel_layers_per_stage")
    chunks = 1 if schedule == "1f1b" else 2
    model = reading.run.keys.get("model")
    if each and model and chunks == 2:  # the embedding and the head count as one layer each
        layers = file_values("model", model)["layers"]
        chunks = max(2, math.ceil((layers + 2) / each) // stages)
    if stages == 1:
        schedule, chunks = "1f1b", 1
    reading.means(f"{name} parallelism.pipeline_parallel_layers_per_stage",
                  {"parallel.schedule": schedule, "parallel.chunks": chunks})  # fmt: skip
    reading.nearly(name, "planned as 1f1b, which keeps fewer activations", *sorted(SCHEDULES)[:1],
                   "Interleaved1F1B", "ZBVZeroBubble")  # fmt: skip


def _batches(reading: Reading, stages: int, replicas: int | None) -> None:
    name = "training.local_batch_size"
    local = reading.integer(name, 8)
    default = None if replicas is None else local * replicas
    batch = reading.integer("training.global_batch_size", -1, "data.global_batch", least=-1)
    batch = default if batch < 1 else batch
    reading.means(f"training.global_batch_size {name}", {"data.global_batch": batch})
    if stages > 1:
        if default is not None and batch > default:
            note = "each accumulated batch fills the pipeline anew; the plan fills it once"
            reading.run.notes.append(f"training.global_batch_size: {note}")
        name, local = "parallelism.pipeline_parallel_microbatch_size", 1
    reading.whole(name, "data.micro_batch", local)
