"""Write our configurations as files of other programs, from their names of the settings."""

import json

MEGATRON_WIRE = {
    ("fp32", "fp16"): ["--accumulate-allreduce-grads-in-fp32"],
    ("bf16", "bf16"): ["--grad-reduce-in-bf16"],
}


def megatron_script(candidate, *more):
    """Return a script with the arguments of a layout, with variables and an array."""
    config, grid = candidate.config, candidate.grid
    model, parallel = config.model, config.parallel
    words = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "vocab-size": model.vocabulary,
        "make-vocab-size-divisible-by": 1,
        "seq-length": config.data.sequence_length,
        "micro-batch-size": config.data.micro_batch,
        "global-batch-size": config.data.global_batch,
        "hidden-dropout": 0,
        "attention-dropout": 0.0,
        "tensor-model-parallel-size": "$TP",
        "pipeline-model-parallel-size": "${PP}",
    }
    lines = [f"  --{name} {value} \\" for name, value in words.items()]
    switches = [f"--{candidate.layout.precision}", *more]
    switches += MEGATRON_WIRE.get((config.collectives.grads_format, candidate.layout.precision), [])
    if parallel.sequence:
        switches.append("--sequence-parallel")
    if parallel.chunks > 1:
        each = model.layers // grid.pipeline // parallel.chunks
        switches.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    per_node = min(8, grid.size)
    return "\n".join(
        [
            f"TP={grid.tensor}",
            f"PP={grid.pipeline}",
            f"N={per_node}",
            "SWITCHES=(",
            *switches,
            ")",
            f"torchrun --nproc_per_node $N --nnodes {grid.size // per_node} pretrain_gpt.py \\",
            *lines,
            '  "${SWITCHES[@]}" --lr 1e-4 --train-iters 100',
        ]
    )


def torchtitan_job(candidate):
    """Return a TOML file without the sizes of the model, which have no flavor."""
    config = candidate.config
    keeps = "never" if candidate.factors.params == 1 else "always"
    wire = {"bf16": "bfloat16", "fp32": "float32"}[config.collectives.grads_format]
    return f"""
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = {config.data.micro_batch}
global_batch_size = {config.data.global_batch}
seq_len = {config.data.sequence_length}
mixed_precision_reduce = "{wire}"
[parallelism]
data_parallel_shard_degree = {candidate.factors.optimizer}
fsdp_reshard_after_forward = "{keeps}"
[activation_checkpoint]
mode = "{config.recompute}"
"""


def deepspeed_files(candidate, folder):
    """Write ds.json and config.json of a Llama; return the path of the former."""
    config, factors, model = candidate.config, candidate.factors, candidate.config.model
    sharded = [factors.optimizer, factors.grads, factors.params]
    zero = {"stage": sum(factor > 1 for factor in sharded)}
    if factors.params == factors.optimizer < factors.data:
        zero["mics_shard_size"] = factors.params
    if config.planner.engine.second_copy_ranks:
        zero["zero_hpz_partition_size"] = config.planner.engine.second_copy_ranks
    replicas = candidate.grid.size
    values = {
        "train_micro_batch_size_per_gpu": config.data.micro_batch,
        "train_batch_size": config.data.global_batch,
        "gradient_accumulation_steps": config.data.global_batch
        // config.data.micro_batch
        // replicas,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    hugging_face = {
        "model_type": "llama",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(hugging_face))
    path = folder / "ds.json"
    path.write_text(json.dumps(values))
    return path
