"""Names that other programs use for keys and values of this configuration."""

import difflib
from collections.abc import Iterable

_KEYS = """
data.global_batch batch_size global_batch_size train_batch_size
data.micro_batch micro_batch_size per_device_train_batch_size gradient_accumulation_steps
data.path dataset data_path train_file
data.sequence_length seq_len seq_length max_seq_len context_length block_size
model.heads n_heads num_heads n_head num_attention_heads
model.hidden d_model hidden_size n_embd dim
model.layers n_layers num_layers n_layer num_hidden_layers
model.vocabulary vocab_size
launch.ranks gpus nproc nproc_per_node devices world_size
optimizer.clip_norm clip_grad grad_clip max_grad_norm
optimizer.learning_rate lr
optimizer.minimum_learning_rate min_lr
optimizer.schedule lr_scheduler lr_schedule scheduler
optimizer.weight_decay wd
parallel.pipeline pp pipeline_model_parallel_size
parallel.tensor tp tensor_model_parallel_size
checkpoint.every_steps save_interval save_steps
precision dtype amp mixed_precision torch_dtype
recompute gradient_checkpointing activation_checkpointing
run.dir output_dir save_dir out_dir
trainer.evaluate_every_steps eval_interval eval_steps
trainer.steps max_steps num_steps train_iters max_iters
"""
_VALUES = """
sharding=zero3 fsdp fsdp2 full_shard stage3 3
sharding=zero2 shard_grad_op stage2 2
sharding=zero1 distributed_optimizer zero stage1 1
sharding=replicated ddp dp no_shard none zero0 0
sharding=mics hsdp hybrid_shard
sharding=zeropp zero++
precision=bf16 fp8 amp mixed bfloat16 float8
precision=fp16 half float16 16
precision=fp32 float float32 single full 32 tf32 fp64 double
optimizer=adamw adam sgd lion
optimizer=adamw_8bit adam8bit adamw8bit adamw_bnb_8bit
checkpoint=lazy async true
checkpoint=blocking sync
checkpoint=off none no false
data=text jsonl json parquet txt file
model.activation=gelu relu gelu_tanh gelu_new
model.activation=swiglu silu swish glu
model.norm=rmsnorm rms rms_norm
model.norm=layernorm layer_norm ln
model.positions=rotary rope alibi
model.positions=learned absolute sinusoidal
optimizer.schedule=wsd trapezoidal
optimizer.schedule=inverse_sqrt noam rsqrt
optimizer.schedule=constant none const
recompute=full true
recompute=none false
attention=sdpa flash flash_attention_2 eager
telemetry.wandb=off false none disabled
telemetry.wandb=online true
parallel.schedule=1f1b gpipe
parallel.schedule=zb_h1 zero_bubble zb
"""

KEYS = {name: line.split()[0] for line in _KEYS.strip().splitlines() for name in line.split()[1:]}
"""The key of this configuration, by the last part of another program's name."""
VALUES = {
    (setting.partition("=")[0], name): setting.partition("=")[2]
    for setting, *names in map(str.split, _VALUES.strip().splitlines())
    for name in names
}
"""The value of this configuration, by key and other name."""


def nearest_value(key: str, got: object, choices: Iterable[str]) -> str | None:
    """Return the choice that a user may mean: a synonym, or else the most similar one."""
    text = str(got).lower()
    known = list(choices)
    if VALUES.get((key, text)) in known:
        return VALUES[key, text]
    return next(iter(difflib.get_close_matches(text, known, n=1, cutoff=0.4)), None)
