"""Names that other programs use for keys and values of this configuration."""

import difflib
from collections.abc import Iterable


def _lines(table: str) -> list[str]:
    return table.replace("\\\n", "").strip().splitlines()


_KEYS = r"""
attention attn_implementation use_flash_attn
checkpoint.every_steps save_interval save_steps
checkpoint.keep save_total_limit keep_latest_k
cluster machine device_type
data.global_batch batch_size global_batch_size train_batch_size
data.micro_batch micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu \
    local_batch_size
data.path dataset data_path train_file dataset_path
data.sequence_length seq_len seq_length max_seq_len context_length block_size \
    max_position_embeddings
data.tokenizer tokenizer_model tokenizer_name tokenizer_path
data.validation_percent split
data.workers num_workers dataloader_num_workers
model.ffn ffn_hidden_size intermediate_size d_ff
model.heads n_heads num_heads n_head num_attention_heads
model.hidden d_model hidden_size n_embd dim
model.kv_heads num_key_value_heads num_query_groups n_kv_heads
model.layers n_layers num_layers n_layer num_hidden_layers
model.norm normalization
model.norm_epsilon rms_norm_eps layer_norm_eps norm_eps
model.positions position_embedding_type
model.rotary_base rope_theta rope_base
model.tied tie_word_embeddings tie_embeddings
model.tied=false untie_embeddings_and_output_weights
model.vocabulary vocab_size
launch.ranks gpus nproc nproc_per_node devices world_size
launch.nodes nnodes num_nodes
optimizer.beta1 adam_beta1
optimizer.beta2 adam_beta2
optimizer.clip_norm clip_grad grad_clip max_grad_norm gradient_clipping max_norm
optimizer.decay_steps lr_decay_iters lr_decay_steps total_num_steps
optimizer.epsilon adam_eps adam_epsilon eps
optimizer.learning_rate lr
optimizer.minimum_learning_rate min_lr
optimizer.schedule lr_scheduler lr_schedule scheduler lr_decay_style lr_scheduler_type
optimizer.warmup_steps lr_warmup_iters warmup_iters num_warmup_steps warmup_num_steps
optimizer.weight_decay wd
parallel.chunks num_layers_per_virtual_pipeline_stage
parallel.context cp context_parallel_size context_parallel_degree
parallel.pipeline pp pipeline_model_parallel_size pipeline_parallel_degree
parallel.schedule pipeline_parallel_schedule
parallel.sequence sequence_parallel
parallel.tensor tp tensor_model_parallel_size tensor_parallel_degree
precision dtype amp mixed_precision torch_dtype
precision=bf16 bf16
precision=fp16 fp16
recompute gradient_checkpointing activation_checkpointing recompute_granularity \
    recompute_activations activation_checkpoint
run.dir output_dir save_dir out_dir save load resume_from_checkpoint
run.init_from model_name_or_path pretrained
sharding zero_stage zero_optimization fsdp stage data_parallel_shard_degree
sharding=zero1 use_distributed_optimizer
telemetry.console_every_steps log_interval logging_steps steps_per_print log_freq
telemetry.wandb report_to
trainer.evaluate_batches eval_iters
trainer.evaluate_every_steps eval_interval eval_steps
trainer.steps max_steps num_steps train_iters max_iters training_steps num_train_epochs
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
model=gpt_125m gpt2 gpt_2 gpt2_small
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

_ACCUMULATED = """
gradient_accumulation_steps gradient_accumulation grad_accumulation_steps accumulate_grad_batches
""".split()
KEYS = {name: key for key, *names in map(str.split, _lines(_KEYS)) for name in names}
KEYS |= dict.fromkeys(_ACCUMULATED, "data.global_batch")
"""The key of this configuration, or a setting, by the last part of another program's name."""
NOTES = {
    **dict.fromkeys(
        _ACCUMULATED,
        "samples per step: those of a micro-batch, times the replicas, times the accumulated "
        "micro-batches",
    ),
    "num_train_epochs": "a run counts steps; its first lines say how many samples an epoch has",
}
"""What a key means, by another program's name with a different meaning."""
VALUES = {
    (setting.partition("=")[0], name): setting.partition("=")[2]
    for setting, *names in map(str.split, _lines(_VALUES))
    for name in names
}
"""The value of this configuration, by key and other name."""


def nearest_value(key: str, got: object, choices: Iterable[str]) -> str | None:
    """Return the choice that a user may mean: a synonym, or else the most similar one."""
    text = str(got).lower().replace("-", "_")
    known = list(choices)
    if VALUES.get((key, text)) in known:
        return VALUES[key, text]
    return next(iter(difflib.get_close_matches(text, known, n=1, cutoff=0.4)), None)
