"""Names that other programs use for keys and values of this configuration."""

import difflib
from collections.abc import Iterable

_KEYS = {
    "data.global_batch": "batch_size global_batch_size train_batch_size batch",
    "data.micro_batch": "micro_batch_size per_device_batch_size per_device_train_batch_size"
    " gradient_accumulation_steps grad_accum",
    "data.path": "dataset data_path train_file train_data corpus",
    "data.sequence_length": "seq_len seq_length max_seq_len context context_length block_size"
    " max_position_embeddings",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_name",
    "model.heads": "n_heads num_heads n_head num_attention_heads",
    "model.hidden": "d_model hidden_size n_embd dim width embed_dim",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "model.layers": "n_layers num_layers n_layer num_hidden_layers depth",
    "model.ffn": "d_ff ffn_hidden_size intermediate_size",
    "model.vocabulary": "vocab_size vocab",
    "model.rotary_base": "rope_theta rope_base",
    "model.tied": "tie_word_embeddings",
    "launch.ranks": "gpus num_gpus nproc nproc_per_node devices world_size processes",
    "optimizer.clip_norm": "clip clip_grad grad_clip max_grad_norm gradient_clip_val",
    "optimizer.learning_rate": "lr rate",
    "optimizer.minimum_learning_rate": "min_lr lr_min",
    "optimizer.schedule": "lr_scheduler lr_schedule lr_scheduler_type scheduler",
    "optimizer.weight_decay": "wd decay",
    "optimizer.warmup_steps": "warmup lr_warmup_iters warmup_iters",
    "parallel.pipeline": "pp pipeline_parallel pipeline_model_parallel_size",
    "parallel.tensor": "tp tensor_parallel tensor_model_parallel_size",
    "checkpoint.every_steps": "save_interval save_steps save_every",
    "precision": "dtype amp mixed_precision torch_dtype",
    "recompute": "gradient_checkpointing activation_checkpointing",
    "run.dir": "output_dir save_dir out_dir out output",
    "trainer.evaluate_every_steps": "eval_interval eval_steps eval_every",
    "trainer.steps": "max_steps num_steps train_iters max_iters iterations iters",
}
_VALUES = {
    "sharding=zero3": "fsdp fsdp2 full_shard fully_shard zero_3 stage3 3",
    "sharding=zero2": "shard_grad_op zero_2 stage2 2",
    "sharding=zero1": "distributed_optimizer zero zero_1 stage1 1",
    "sharding=replicated": "ddp dp no_shard none off zero0 0",
    "sharding=mics": "hsdp hybrid_shard hybrid",
    "sharding=zeropp": "zero++ hpz",
    "precision=bf16": "fp8 amp mixed bfloat16 bf16-mixed float8",
    "precision=fp16": "half float16 16 fp16-mixed",
    "precision=fp32": "float float32 single full 32 tf32 fp64 double",
    "optimizer=adamw": "adam sgd lion fused_adam",
    "optimizer=adamw_8bit": "adam8bit adamw8bit adam_8bit adamw_bnb_8bit",
    "checkpoint=lazy": "async asynchronous true on",
    "checkpoint=blocking": "sync synchronous",
    "checkpoint=off": "none no never",
    "data=text": "jsonl json parquet txt file custom",
    "model.activation=gelu": "relu gelu_tanh gelu_new gelu_fast gelu_pytorch_tanh",
    "model.activation=swiglu": "silu swish swi_glu glu",
    "model.norm=rmsnorm": "rms rms_norm",
    "model.norm=layernorm": "layer_norm ln layer",
    "model.positions=rotary": "rope alibi",
    "model.positions=learned": "absolute sinusoidal",
    "model.positions=relative": "t5",
    "optimizer.schedule=wsd": "trapezoidal warmup_stable_decay",
    "optimizer.schedule=inverse_sqrt": "noam rsqrt",
    "optimizer.schedule=constant": "none flat const",
    "recompute=full": "true on all",
    "recompute=none": "false off no",
    "attention=sdpa": "flash flash_attention flash_attention_2 eager math",
    "telemetry.wandb=off": "false none disabled no",
    "telemetry.wandb=online": "true on",
    "parallel.schedule=1f1b": "gpipe one_f_one_b",
    "parallel.schedule=interleaved": "interleaved_1f1b vpp",
    "parallel.schedule=zb_h1": "zero_bubble zb",
}

KEYS = {name: key for key, names in _KEYS.items() for name in names.split()}
"""The key of this configuration, by the last part of another program's name."""
VALUES = {
    (key, name): value
    for setting, names in _VALUES.items()
    for key, _, value in [setting.partition("=")]
    for name in names.split()
}
"""The value of this configuration, by key and other name."""


def nearest_value(key: str, got: object, choices: Iterable[str]) -> str | None:
    """Return the choice that a user may mean: a synonym, or else the most similar one."""
    text = str(got).lower()
    known = list(choices)
    if VALUES.get((key, text)) in known:
        return VALUES[key, text]
    return next(iter(difflib.get_close_matches(text, known, n=1, cutoff=0.4)), None)
