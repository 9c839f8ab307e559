"""Read the arguments of Megatron-LM and Megatron-DeepSpeed from a script or from a log.

Names and default values are those of megatron/training/arguments.py (Megatron-LM, core 0.16).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_lab.foreign.foreign_run import ForeignRun, Reading, written
from frontier_lab.foreign.option_words import flags, sbatch, slurm, world_size
from frontier_lab.foreign.shell_words import read_script
from frontier_llm.errors import ConfigError

MARKS = {"--num-layers", "--tensor-model-parallel-size", "--micro-batch-size", "--hidden-size"}
"""Arguments by which a command is recognised."""
DUMP = re.compile(r"-{8,} arguments -{8,}(.*?)-{8,} end of arguments", re.DOTALL)
_YAML = re.compile(r"^[ \t]*(--[\w-]+):[ \t](.{0,400}?)[ \t]{0,9}(?:[ \t]#.*)?$", re.MULTILINE)
_ENVIRONMENT = re.compile(r"(?:activate|modules\.sh|conda\.sh|bashrc|profile)$|^<?$")
"""Files that scripts source, in which no arguments are expected."""
_DUMPED = re.compile(r"(?:^|[\s>:\]])\s*(\w+) (\.{2,}|) ?(.*)$")
_PADDED = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d{1,12})\)")
TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "LLama3Tokenizer": 128256}
"""Sizes of the vocabularies with which tokenizers are used most."""
OLD = {
    "model_parallel_size": "tensor_model_parallel_size",
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "batch_size": "micro_batch_size",
    "inner_hidden_size": "ffn_hidden_size",
    "max_sequence_length": "seq_length",
    "no_tie_embed_logits": "untie_embeddings_and_output_weights",
}
"""Names of the first versions and of other programs that grew out of Megatron-LM."""
OPEN = "$"
"""The name of the words that may hold other options."""
_CORE = (
    "no published runs were compared with megatron_core: the error is that of its predecessor, "
    "megatron_2022"
)
DENSE = "the planner counts dense decoders only"
_SMALL_STATES = (
    "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype "
    "exp_avg_sq_dtype grad_reduce_in_bf16"
)
_KERNELS = (
    "cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute "
    "wgrad_deferral_limit overlap_p2p_communication overlap_p2p_communication_warmup_flush "
    "no_overlap_p2p_communication no_async_tensor_model_parallel_allreduce no_rope_fusion "
    "no_gradient_accumulation_fusion no_masked_softmax_fusion no_bias_gelu_fusion "
    "no_bias_swiglu_fusion no_bias_dropout_fusion no_persist_layer_norm attention_softmax_in_fp32 "
    "delay_wgrad_compute enable_cuda_graph embed_layernorm softmax_type "
    "no_scatter_gather_tensors_in_pipeline distribute_checkpointed_activations"
)
_VARIANTS = (
    "multi_latent_attention hybrid_override_pattern is_hybrid_model mtp_num_layers "
    "heterogeneous_layers_config_path decoder_num_layers decoder_seq_length hybrid_attention_ratio "
    "hybrid_mlp_ratio language_model_type"
)
IGNORED = """
    *_fusion abort_on* adam_* add_position_embedding adlr_* align_* app_tag* apply_layernorm_1p
    apply_query_key* apply_residual* async_save async_tensor* attention_sink_k auto_detect*
    barrier_with* batch_p2p* bert_* biencoder* block_data* c calculate_per* check_*
    checkpoint_acti* ckpt_* classes_fraction clip_grad clone_scatter* config_logger* consumed_*
    cp_comm_type create_attention* cuda_graph_* data_* dataloader* decoupled* deepscale*
    deepspeed_config deepspeed_mpi deprecated* dino_* dist_ckpt* distributed_* embedding_init*
    empty_unused* enable_gloo* enable_one_logger encoder_*_parallel_size encoder_num_layers
    encoder_seq_length end_weight* eod_mask* error_inj* eval_* evidence* exit_* expert_tensor*
    finetune fp8_* full_validation glu_linear* head_lr* hysteresis ict_* img_* indexer*
    inference_* init_method* initial_loss* iter_per* iterations* kill_switch* kv_lora* lazy_mpu*
    legacy_tok* load local_rank log_* log_optimizer* logging* loss_scale* lr lr_* mamba_*
    manual_gc* mask_* master_* max_position* max_tokens_to* mem*snapshot* merge_file min_loss*
    min_lr mmap_* mock_data moe_* mscale* mtp_loss* muon_* nccl_comm* nnodes no_check*
    no_create_att* no_load* no_log* no_mmap* no_pipeline* no_position_emb* no_query_key*
    no_save* node_rank non_persistent* norm_epsilon nproc_per_node num_channels num_classes
    num_dataset* num_layers_at_* num_workers one_logger* original_max* output_bert*
    overlap_p2p_comm* override_opt* params_dtype patch_dim patch_tok* per_split* perform_init*
    pretrained_ck* profile* q_lora* qk_head* qk_pos* query_in* rank rdzv_* record_mem* renorm*
    rerun* reset_* result_rej* retriever* retro_* rope_scaling_factor rotary_base rotary_inter*
    rotary_scaling* rotary_seq* sample_rate save save_* seed sgd_* short_seq* skip* split
    start_weight* straggler* swin_* tensorboard* test_* tiktoken* timing_log* titles_*
    tokenizer_* torch_fsdp2* tp_comm_* trace* train_* transformer_pipeline* use_checkpoint*
    use_cpu_init* use_dist_ckpt* use_mcore* use_mp_args* use_mpi use_one_sent* use_persist*
    use_pytorch* use_rope_scaling use_token* v_head* valid_* vision_* vocab_extra* vocab_file
    wandb* weight_decay* yaml_cfg yarn_* zero_*
""".split()
"""Patterns of arguments that influence neither time nor memory of a dense model's step."""


def read_dump(text: str, dump: str) -> dict[str, Any]:
    """Return the arguments that a log prints by name; later lines tell the padded vocabulary."""
    values: dict[str, Any] = {}
    for line in dump.splitlines():
        if found := _DUMPED.search(line.rstrip()):
            name, _, value = found.groups()
            values[name] = {"None": None, "True": True, "False": False}.get(value, value)
    if padded := _PADDED.search(text):
        values["padded_vocab_size"] = padded[1]
    return values


def read_commands(
    text: str, variables: Mapping[str, list[str]], folder: Path | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of a script's last training command, and what could not be decided.

    `variables` are those of the environment and, by number, the script's arguments; `folder` has
    the files that it sources.
    """
    batch = sbatch(text)
    if keys := _YAML.findall(text):  # options as keys of YAML
        text = " ".join(f"{name} {value}" for name, value in keys)
    script = read_script(text, {**slurm(batch), **variables}, folder=folder)
    found = [words for words in script.commands if _marks(words)]
    found = found or [words for words in script.left_out if _marks(words)]
    found = [words for words in found if words[0] != "echo"] or found
    if not found:  # a file that only sets variables
        found = [[word for words in script.variables.values() for each in words
                  for word in each.split()]]  # fmt: skip
    words = found[-1]
    ends = [index for index, word in enumerate(words) if word.endswith(".py")]
    after = ends[0] + 1 if ends else 0
    launched = flags(words[: after - 1] if after else words)[0]
    launched |= {name: value for name, value in batch.items() if name not in launched}
    values, unknown = flags(words[after:])
    values |= {OPEN: unknown} if unknown else {}
    if ends and "bert" in words[ends[0]]:
        script.undecided.append(f"the mask of {words[ends[0]]} (planned as a causal decoder)")
    if "world_size" not in values and (size := world_size(launched)):
        values["world_size"] = size
    sources = [f"source {word}" for word in script.unread if not _ENVIRONMENT.search(word)]
    options = [f"options in {word}" for word in unknown]
    return values, [*script.undecided, *options, *sources]


def is_megatron(text: str, folder: Path | None = None) -> bool:
    """Return whether a script has arguments of Megatron-LM, or sources a file that has them."""
    if any(mark in text.replace("_", "-") for mark in MARKS):
        return True
    starts = re.search(r"\b(?:source|bash|sh|sbatch)[ \t]|^[ \t]*\.[ \t]", text, re.MULTILINE)
    return bool(starts) and any(map(_marks, read_script(text, folder=folder).commands))


def _marks(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in MARKS for word in words)


def read_arguments(
    values: Mapping[str, Any], where: str, given: Mapping[str, str], ranks: int | None, dumped: bool
) -> ForeignRun:
    """Translate arguments to a run; `ranks` of the command line replace those of the file."""
    run = ForeignRun("Megatron-LM", "megatron_core", _CORE)
    old = {new: name for name, new in OLD.items() if name in values and new not in values}
    values = {**values, **{new: values[name] for new, name in old.items()}}
    values = {name: value for name, value in values.items() if name not in old.values()}

    def spell(name: str) -> str:
        name = old.get(name, name)
        return name if dumped else f"--{name.replace('_', '-')}"

    reading = Reading(run, where, values, given, spell)
    if "model" not in given:
        reading.refuse_if("num_experts expert_model_parallel_size", DENSE, "[1]", "1", "0", 1)
        reading.refuse_if(_VARIANTS, DENSE, "0", "0.0")
    offload = "the planner keeps optimizer states on the device"
    reading.refuse_if("optimizer_cpu_offload cpu_optimizer", offload)
    run.ranks = ranks or reading.integer("world_size")
    name = "world_size"
    if dumped or not run.ranks or ranks:
        reading.means(name, meaning=f"{run.ranks} ranks" if run.ranks else "")
    else:
        run.rows.append(("(launcher)", str(values[name]), f"{run.ranks} ranks"))
    tensor = _layout(reading)
    _model(reading, tensor)
    _engine(reading)
    _states(reading)
    _recompute(reading)
    small = "planned with states and sums in fp32, which take more memory"
    reading.nearly(_SMALL_STATES, small, "torch.float32", "fp32")
    kernels = "planned with the kernels and the order of the engine"
    reading.nearly(_KERNELS, kernels, "native", "0", "vanilla")
    reading.nearly("outer_dp_sharding_strategy", "planned with one copy of the states", "no_shard")
    fp8 = "fp8 fp8_format fp8_hybrid fp8_e4m3 fp8_param_gather"
    reading.nearly(fp8, "planned in 16 bits, so it may be faster")
    reading.nearly("tp_comm_overlap", "the plan overlaps no messages between tensor ranks")
    zero_bubble = "enable_zero_bubble zero_bubble_v_schedule"
    reading.nearly(zero_bubble, "planned as 1f1b, which waits for longer")
    reading.nearly("rampup_batch_size", "the plan is for the final batch")
    reading.nearly("cpu_offloading", "the plan keeps activations on the device")
    if {"model.hidden", "model.heads"} & run.missing.keys():  # these follow from them
        for key in ("model.ffn", "model.kv_heads", "model.head_dim"):
            if run.missing.get(key, "").startswith("no "):
                del run.missing[key]
    return reading.finish(IGNORED)


def _layout(reading: Reading) -> int:
    """Read sizes of groups and batches; return the number of tensor ranks."""
    tensor: int = reading.whole("tensor_model_parallel_size", "parallel.tensor", 1)
    stages = reading.whole("pipeline_model_parallel_size", "parallel.pipeline", 1)
    ulysses = reading.integer("ds_sequence_parallel_size", 1)
    reading.nearly("ds_sequence_parallel_size", "planned as context parallelism", "1", 1)
    context = reading.whole("context_parallel_size", "parallel.context", ulysses)
    sequence = reading.flag("sequence_parallel") and tensor > 1
    reading.means("sequence_parallel", {"parallel.sequence": sequence})
    data = reading.data_ranks(tensor, stages, context)
    layers = reading.whole("num_layers", "model.layers")
    name = "num_layers_per_virtual_pipeline_stage"
    each, chunks = reading.integer(name), reading.integer("num_virtual_stages_per_pipeline_rank", 1)
    ends = [reading.flag(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")]
    ends = ends if stages > 1 else [False, False]
    if each and layers:
        parts = layers + sum(ends)
        if parts % (stages * each):
            wants = f"a divisor of {parts} layers / {stages} stages"
            raise reading.refused(name, wants, "correct it, or set the numbers of layers or stages")
        chunks = parts // stages // each
    keys = {"parallel.chunks": chunks, "parallel.schedule": "interleaved" if chunks > 1 else "1f1b"}
    reading.means(f"{name} num_virtual_stages_per_pipeline_rank", keys)
    _uneven(reading, layers, stages, chunks, ends)
    reading.whole("seq_length", "data.sequence_length")
    micro = reading.whole("micro_batch_size", "data.micro_batch")
    steps = reading.integer("gas", 1)
    default = micro * data // context * steps if micro and data else None
    reading.whole("global_batch_size", "data.global_batch", default)
    reading.get("data_parallel_size")
    return tensor


def _uneven(
    reading: Reading, layers: int | None, stages: int, chunks: int, ends: Sequence[bool]
) -> None:
    """Read the numbers of layers of the first and the last stage.

    `ends` says whether the embedding and the head count as one layer each.
    """
    if any(ends) and layers:
        name, parts = "account_for_{}_in_pipeline_split", layers + sum(ends)
        counted = [name.format(end) for end in ("embedding", "loss")]
        of_chunk, rest = divmod(parts, stages * chunks)
        if rest:
            wants = f"with {parts} layers and ends, a number that {stages * chunks} chunks divide"
            raise reading.refused(counted[not ends[0]], wants, "correct the numbers")
        each = [of_chunk] * (stages * chunks)
        each[0] -= ends[0]
        each[-1] -= ends[1]
        reading.means(" ".join(counted), {"parallel.layers_per_stage": each})
        return
    names = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
    first, last = (reading.integer(name) for name in names)
    method, parts = "pp_partition_method", (layers or 0) + 2
    if reading.get(method) == "type:transformer|embedding" and stages > 1 and chunks == 1:
        even = parts % stages == 0  # the embedding and the head count as one layer each
        each = [parts // stages - (stage in (0, stages - 1)) for stage in range(stages)]
        reading.means(method, {"parallel.layers_per_stage": each if even else "auto"})
        return
    reading.nearly(method, "planned with equal stages", "type:transformer", "uniform")
    if not layers or stages == 1 or not (first or last):
        return
    inner = stages - bool(first) - bool(last)
    rest = layers - (first or 0) - (last or 0)
    each = [first] * bool(first) + [rest // max(inner, 1)] * inner + [last] * bool(last)
    if sum(each) != layers or min(each) < 1 or any(stage % chunks for stage in each):
        wants = (
            f"numbers that leave {inner} equal stages of the {layers} layers, and stages that are "
            f"divisible by {chunks} chunks"
        )
        raise reading.refused(names[0] if first else names[1], wants, "correct the numbers")
    of_chunks = [stage // chunks for stage in each] * chunks
    reading.means(" ".join(names), {"parallel.layers_per_stage": of_chunks})


def _model(reading: Reading, tensor: int) -> None:
    reading.run.keys |= {"model": "gpt", "model.name": "megatron"}
    hidden = reading.whole("hidden_size", "model.hidden")
    heads = reading.whole("num_attention_heads", "model.heads")
    gated = reading.flag("swiglu") or reading.get("glu_activation") is not None
    reading.means("swiglu glu_activation", {"model.activation": "swiglu" if gated else "gelu"})
    reading.nearly("squared_relu openai_gelu xielu", "planned as gelu")
    width = hidden and (int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden)
    reading.whole("ffn_hidden_size", "model.ffn", width)
    kv_heads = reading.integer("num_query_groups", 1, "model.kv_heads")
    kv_heads = kv_heads if reading.flag("group_query_attention") else heads
    kv_heads = reading.integer("num_key_value_heads", kv_heads, "model.kv_heads")
    names = "group_query_attention num_query_groups num_key_value_heads"
    reading.means(names, {"model.kv_heads": kv_heads})
    reading.whole("kv_channels", "model.head_dim", hidden and heads and max(1, hidden // heads))
    _vocabulary(reading, tensor)
    rotary = dict.fromkeys(
        ("rope", "rotary", "mrope", "yarn", "alibi", "none", "relative"), "rotary"
    )
    old = "rope" if reading.flag("use_rotary_position_embeddings") else "learned_absolute"
    reading.choose("position_embedding_type", "model.positions",
                   {"learned_absolute": "learned", **rotary}, old)  # fmt: skip
    reading.nearly("position_embedding_type", "planned as rotary", "rope", "rotary",
                   "learned_absolute")  # fmt: skip
    reading.run.keys["model.rotary_fraction"] = written(reading.number("rotary_percent", 1.0))
    norms = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
    norms |= {name.lower(): ours for name, ours in norms.items()}  # of Megatron-DeepSpeed
    default = "RMSNorm" if reading.flag("use_rms_norm") else "LayerNorm"
    reading.choose("normalization", "model.norm", norms, default)
    bias = reading.values.get("add_bias_linear") is not False
    bias = not reading.flag("disable_bias_linear") and bias
    if "glu_activation" in reading.values:  # Megatron-LLM has biases on request
        bias = reading.flag("use_bias")
    reading.means("disable_bias_linear add_bias_linear", {"model.bias": bias})
    reading.means("add_qkv_bias", {"model.qkv_bias": reading.flag("add_qkv_bias") or bias})
    name = "untie_embeddings_and_output_weights"
    reading.means(name, {"model.tied": not reading.flag(name)})
    norm = "head" if reading.flag("qk_layernorm") else "none"
    reading.means("qk_layernorm", {"model.qk_norm": norm})
    for theirs, ours in (("hidden", ""), ("attention", "attention_")):
        name = f"{theirs}_dropout"
        reading.means(name, {f"model.{ours}dropout": reading.number(name, 0.1)})
    reading.refuse_if("window_size", "sliding windows are not read from these arguments")


def _vocabulary(reading: Reading, tensor: int) -> None:
    """Read the vocabulary, which is padded for the tensor ranks."""
    size, tokenizer = reading.integer("vocab_size"), str(reading.get("tokenizer_type", ""))
    if size and tokenizer == "NullTokenizer":
        size += 1  # for the end of documents
    if not size and reading.values.get("padded_vocab_size") is None:
        size = _known_vocabulary(reading, tokenizer)
    multiple = reading.integer("make_vocab_size_divisible_by", 128) * tensor
    padded = reading.integer("pad_vocab_size_to", size and -(-size // multiple) * multiple)
    padded = reading.integer("padded_vocab_size", padded)
    names = "padded_vocab_size pad_vocab_size_to vocab_size tokenizer_type"
    shown = [name for name in names.split() if reading.values.get(name) is not None]
    key = "model.vocabulary"
    reading.means(" ".join(shown) or "vocab_size", {key: padded})
    if key in reading.run.missing:
        named = tokenizer or reading.values.get("patch_tokenizer_type")
        of = f"; it depends on the tokenizer, {named}" if named else ""
        reading.run.missing[key] = f"no --vocab-size{of}"


def _known_vocabulary(reading: Reading, tokenizer: str) -> int | None:
    """Return the usual size of a tokenizer's vocabulary, and note that it is assumed."""
    patch = str(reading.get("patch_tokenizer_type", ""))
    file = str(reading.values.get("vocab_file") or "")
    if not tokenizer and not patch and ("gpt2" in file or "$" in file):
        tokenizer = "GPT2BPETokenizer"  # the default of pretrain_gpt.py
    size = TOKENIZERS.get(patch) or TOKENIZERS.get(tokenizer)
    model = str(reading.values.get("tokenizer_model") or "").lower()
    others = {
        "GPT2BPETokenizer": file and "gpt2" not in file and "$" not in file,
        "Llama2Tokenizer": model and not re.search(r"llama|tokenizer\.model$|\$", model),
    }
    if others.get(tokenizer):
        return None  # the vocabulary of another tokenizer of this kind
    if size:
        size += reading.integer("extra_vocab_size", 0, least=0) if patch else 0
        note = f"{patch or tokenizer} is assumed to have {size} tokens; else give model.vocabulary"
        reading.run.notes += [] if "model.vocabulary" in reading.given else [note]
    return size


def _states(reading: Reading) -> None:
    """Read number formats and the sharding of states."""
    bf16, fp16 = reading.flag("bf16"), reading.flag("fp16")
    if bf16 and fp16:
        raise reading.refused("fp16", "one of bf16 and fp16", "leave out the other")
    kind = None if reading.get(OPEN) else "fp32"
    reading.means("bf16 fp16", {"precision": "bf16" if bf16 else "fp16" if fp16 else kind})
    names = "accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16"
    in_fp32 = reading.flag(names.split()[0]) or bf16 or not fp16
    wire = "fp32" if in_fp32 and not reading.flag("grad_reduce_in_bf16") else "bf16"
    keys = {"collectives.grads_format": wire}
    if reading.flag("grad_reduce_in_bf16"):
        keys["planner.engine.sums_bytes"] = "2"
    reading.means(names, keys)
    reading.optimizer("optimizer", "adam")
    names, stage = "use_distributed_optimizer", int(reading.flag("use_distributed_optimizer"))
    if reading.flag("deepspeed"):
        names, stage = "zero_stage bf16", reading.integer("zero_stage", 0, least=0)
        stage = max(stage, int(bf16))  # DeepSpeed's optimizer for bf16 always shards its states
    elif reading.flag("use_torch_fsdp2") or reading.flag("use_megatron_fsdp"):
        words = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
        names = "data_parallel_sharding_strategy"
        default = "optim_grads_params" if reading.flag("use_torch_fsdp2") else "no_shard"
        stage = int(reading.word(names, words, default))
        names += " use_torch_fsdp2 use_megatron_fsdp"
    factors = zero_factors(stage, reading.run.program, names)
    if (parts := reading.integer("num_distributed_optimizer_instances", 1)) > 1:
        groups = [int(reading.run.keys[f"parallel.{name}"]) for name in ("tensor", "pipeline")]
        data = reading.data_ranks(groups[0], groups[1], 1)
        if data and data % parts:
            name = "num_distributed_optimizer_instances"
            raise reading.refused(name, f"a divisor of {data} data ranks", "correct it")
        factors["sharding.optimizer"] = data and data // parts
        names += " num_distributed_optimizer_instances"
    reading.means(names, factors)


def zero_factors(stage: int, program: str, names: str) -> dict[str, Any]:
    """Return the sharding factors of a stage of ZeRO (arXiv:1910.02054)."""
    if stage not in range(4):
        raise ConfigError(f"{program}: {names}", stage, "a stage of ZeRO, 0 to 3", "correct it")
    states = ("optimizer", "grads", "params")
    return {f"sharding.{name}": "all" if at < stage else 1 for at, name in enumerate(states)}


def _recompute(reading: Reading) -> None:
    switches = "checkpoint_activations deepspeed_activation_checkpointing recompute_activations"
    old, deepspeed, selective = map(reading.flag, switches.split())
    default = "full" if old else "selective" if selective else "none"
    if deepspeed and not old:
        note = "configures recomputation, which --checkpoint-activations switches on"
        reading.nearly("deepspeed_activation_checkpointing", note)
    kinds = {kind: kind for kind in ("full", "selective", "none")}
    kind = reading.word("recompute_granularity", kinds, default)
    names = f"recompute_granularity recompute_method recompute_num_layers {switches} "
    names += "checkpoint_num_layers"
    reading.means(names, {"recompute": kind})
    if kind == "full" and reading.get("recompute_num_layers", "1") not in ("1", 1):
        reading.nearly(
            "recompute_num_layers", "planned as if every layer were recomputed by itself"
        )
    if kind == "selective":
        reading.nearly("recompute_modules", "planned as core_attn", "core_attn", "['core_attn']")


def _engine(reading: Reading) -> None:
    """Choose the engine: arguments that only old versions have, and DeepSpeed's, tell it."""
    run, values, keys = reading.run, reading.values, dict[str, Any]()
    flash = reading.flag("use_flash_attn") or reading.flag("use_flash_attn_v2")
    backend = str(reading.get("attention_backend", "auto")).rpartition(".")[2]
    local = backend in ("unfused", "local") or reading.get("transformer_impl") == "local"
    fused = "planner.engine.fused_attention"
    if reading.flag("deepspeed"):
        run.program, run.engine, run.engine_note = "Megatron-DeepSpeed", "deepspeed", ""
        keys[fused] = flash
    elif "DDP_impl" in values or "checkpoint_activations" in values:
        new = values.get("sequence_parallel") or values.get("recompute_granularity")
        run.engine, run.engine_note = "megatron_2022" if new else "megatron_2021", ""
    else:
        keys[fused] = flash or not local
        overlaps = reading.flag("overlap_grad_reduce")
        names = "overlap_grad_reduce overlap_param_gather"
        reading.means(names, {"planner.engine.overlaps": overlaps})
    names = "deepspeed DDP_impl checkpoint_activations"
    reading.means(names, {"planner.engine": run.engine})
    reading.means("use_flash_attn use_flash_attn_v2 attention_backend transformer_impl", keys)
