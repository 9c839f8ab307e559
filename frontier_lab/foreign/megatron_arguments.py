"""Read the arguments of Megatron-LM and Megatron-DeepSpeed from a script or from a log.

Names and default values are those of megatron/training/arguments.py (Megatron-LM, core 0.16).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier_lab.foreign.foreign_run import ForeignRun, Reading, written
from frontier_lab.foreign.shell_words import read_script, split_words
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
SWITCHES = set(
    """
    accumulate_allreduce_grads_in_fp32 add_qkv_bias bf16 checkpoint_activations deepspeed
    deepspeed_activation_checkpointing disable_bias_linear fp16 fp8_param_gather
    grad_reduce_in_bf16 group_query_attention overlap_grad_reduce overlap_param_gather
    qk_layernorm recompute_activations sequence_parallel swiglu tp_comm_overlap
    untie_embeddings_and_output_weights use_distributed_optimizer use_flash_attn use_flash_attn_v2
    use_mcore_models use_megatron_fsdp use_rotary_position_embeddings use_torch_fsdp2
    """.split()
)
"""Options without a value."""
_CORE = (
    "no published runs were compared with megatron_core: the error is that of its predecessor, "
    "megatron_2022"
)
DENSE = "the planner counts dense decoders only"
_SMALL_STATES = (
    "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype "
    "exp_avg_sq_dtype"
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
    barrier_with* batch_p2p* bert_* biencoder* block_data* calculate_per* check_*
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
    batch = _sbatch(text)
    if keys := _YAML.findall(text):  # options as keys of YAML
        text = " ".join(f"{name} {value}" for name, value in keys)
    script = read_script(text, {**_slurm(batch), **variables}, folder=folder)
    found = [words for words in script.commands if _marks(words)]
    found = [words for words in found if words[0] != "echo"] or found
    if not found:  # a file that only sets variables
        found = [[word for words in script.variables.values() for each in words
                  for word in each.split()]]  # fmt: skip
    words = found[-1]
    ends = [index for index, word in enumerate(words) if word.endswith(".py")]
    after = ends[0] + 1 if ends else 0
    launched = _flags(words[: after - 1] if after else words)[0]
    launched |= {name: value for name, value in batch.items() if name not in launched}
    values, unknown = _flags(words[after:])
    if ends and "bert" in words[ends[0]]:
        script.undecided.append(f"the mask of {words[ends[0]]} (planned as a causal decoder)")
    if "world_size" not in values and (size := _world_size(launched)):
        values["world_size"] = size
    sources = [f"source {word}" for word in script.unread if not _ENVIRONMENT.search(word)]
    options = [f"options in {word}" for word in unknown]
    return values, [*script.undecided, *options, *sources]


def is_megatron(text: str, folder: Path | None = None) -> bool:
    """Return whether a script has arguments of Megatron-LM, or sources a file that has them."""
    if any(mark in text for mark in MARKS):
        return True
    sources = re.search(r"^[ \t]*(?:source|\.)[ \t]", text, re.MULTILINE)
    return bool(sources) and any(map(_marks, read_script(text, folder=folder).commands))


def _marks(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in MARKS for word in words)


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of options, and variables of unknown value that may hold other options."""
    values: dict[str, Any] = {}
    unknown: list[str] = []
    name = ""
    for word in (
        part for each in words for part in (split_words(each) if "--" in each else [each])
    ):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if has_value else True
        elif re.fullmatch(r"[0-9]?(?:[|>&;]+|2>&1)[^\s|]*", word):
            break  # of a command in a variable
        elif re.fullmatch("-(?:[A-Za-z][0-9]*|np|npernode|ppn)", word):
            name = word[1:] if word[1:3] in ("np", "pp") else word[1]
            values[name] = word[2:] if word[2:].isdigit() else True
        elif re.fullmatch(r"\$[\w@*{}\[\]]+", word) and (
            not name or name in SWITCHES or values[name] is not True
        ):
            unknown += [word] if word not in unknown and "path" not in name else []
        elif name:
            values[name] = word if values[name] is True else f"{values[name]} {word}"
    return values, unknown


def _sbatch(text: str) -> dict[str, Any]:
    """Return the options of the lines #SBATCH of a script."""
    words = re.findall(r"^#SBATCH[ \t]+(.*?)(?:[ \t]#.*)?$", text, re.MULTILINE)
    return _flags(" ".join(words).split())[0]


def _digits(launched: Mapping[str, Any], *names: str) -> int | None:
    """Return the number at the end of the first of some options; None = there is none."""
    texts = (str(launched.get(name, "")).strip("\"'\r") for name in names)
    found = (re.fullmatch(r"(?:[^$`]*\D)?(\d{1,7})", text) for text in texts)
    return next((int(digits[1]) for digits in found if digits), None)


def _slurm(batch: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the variables that Slurm sets for a job with these options."""
    nodes, gpus = _digits(batch, "nodes", "N"), _digits(batch, "gpus_per_node", "gres")
    each = _digits(batch, "ntasks_per_node")
    tasks = _digits(batch, "ntasks", "n") or (nodes * each if nodes and each else None)
    sizes = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": each,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_CPUS_PER_TASK": _digits(batch, "cpus_per_task", "c"),
    }
    return {name: [str(size)] for name, size in sizes.items() if size}


def _world_size(launched: Mapping[str, Any]) -> int | None:
    """Return the number of processes that torchrun, deepspeed or srun start, if it is known."""
    nodes = _digits(launched, "nnodes", "num_nodes", "nodes", "N")
    tasks, gpus = _digits(launched, "ntasks_per_node"), _digits(launched, "gpus_per_node", "gres")
    each = _digits(launched, "nproc_per_node", "num_gpus", "npernode", "ppn")
    if each is None:  # one task of a node may start a process for each GPU
        each = gpus if gpus and tasks in (None, 1) else tasks
    elif "nproc_per_node" in launched and nodes is None and "nnodes" not in launched:
        nodes = 1  # the default of torchrun
    total = _digits(launched, "np", "ntasks", "n", "gpus", "G")
    return nodes * each if nodes and each else total


def read_arguments(
    values: Mapping[str, Any], where: str, given: Mapping[str, str], ranks: int | None, dumped: bool
) -> ForeignRun:
    """Translate arguments to a run; `ranks` of the command line replace those of the file."""
    run = ForeignRun("Megatron-LM", "megatron_core", _CORE)
    reading = Reading(run, where, values, given, str if dumped else _as_flag)
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
    reading.nearly("fp8 fp8_format fp8_param_gather", "planned in 16 bits, so it may be faster")
    reading.nearly("tp_comm_overlap", "the plan overlaps no messages between tensor ranks")
    reading.nearly("rampup_batch_size", "the plan is for the final batch")
    reading.nearly("cpu_offloading", "the plan keeps activations on the device")
    if {"model.hidden", "model.heads"} & run.missing.keys():  # these follow from them
        for key in ("model.ffn", "model.kv_heads", "model.head_dim"):
            if run.missing.get(key, "").startswith("no "):
                del run.missing[key]
    return reading.finish(IGNORED)


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    if each and layers:
        if layers % (stages * each):
            wants = f"a divisor of {layers} layers / {stages} stages"
            raise reading.refused(name, wants, "correct it, or set the numbers of layers or stages")
        chunks = layers // stages // each
    keys = {"parallel.chunks": chunks, "parallel.schedule": "interleaved" if chunks > 1 else "1f1b"}
    reading.means(f"{name} num_virtual_stages_per_pipeline_rank", keys)
    _uneven(reading, layers, stages, chunks)
    reading.whole("seq_length", "data.sequence_length")
    micro = reading.whole("micro_batch_size", "data.micro_batch")
    default = micro * data // context if micro and data else None
    reading.whole("global_batch_size", "data.global_batch", default)
    reading.get("data_parallel_size")
    return tensor


def _uneven(reading: Reading, layers: int | None, stages: int, chunks: int) -> None:
    """Read the numbers of layers of the first and the last stage."""
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
    if chunks > 1 or inner < 1 or rest < inner or rest % inner:
        wants = f"with 1 chunk, {inner} equal stages of the {rest} other layers"
        raise reading.refused(names[0] if first else names[1], wants, "correct the numbers")
    each = [first] * bool(first) + [rest // inner] * inner + [last] * bool(last)
    reading.means(" ".join(names), {"parallel.layers_per_stage": each})


def _model(reading: Reading, tensor: int) -> None:
    reading.run.keys |= {"model": "gpt", "model.name": "megatron"}
    hidden = reading.whole("hidden_size", "model.hidden")
    heads = reading.whole("num_attention_heads", "model.heads")
    gated = reading.flag("swiglu")
    reading.means("swiglu", {"model.activation": "swiglu" if gated else "gelu"})
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
    rotary = dict.fromkeys(("rope", "mrope", "yarn", "alibi", "none", "relative"), "rotary")
    old = "rope" if reading.flag("use_rotary_position_embeddings") else "learned_absolute"
    reading.choose("position_embedding_type", "model.positions",
                   {"learned_absolute": "learned", **rotary}, old)  # fmt: skip
    reading.nearly("position_embedding_type", "planned as rotary", "rope", "learned_absolute")
    reading.run.keys["model.rotary_fraction"] = written(reading.number("rotary_percent", 1.0))
    norms = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
    norms |= {name.lower(): ours for name, ours in norms.items()}  # of Megatron-DeepSpeed
    reading.choose("normalization", "model.norm", norms, "LayerNorm")
    bias = reading.values.get("add_bias_linear") is not False
    bias = not reading.flag("disable_bias_linear") and bias
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
    if tokenizer == "GPT2BPETokenizer" and file and "gpt2" not in file and "$" not in file:
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
    if not (bf16 or fp16):
        reading.run.notes.append("neither bf16 nor fp16 is set: planned in fp32")
    reading.means("bf16 fp16", {"precision": "bf16" if bf16 else "fp16" if fp16 else "fp32"})
    names = "accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16"
    in_fp32 = reading.flag(names.split()[0]) or bf16 or not fp16
    wire = "fp32" if in_fp32 and not reading.flag("grad_reduce_in_bf16") else "bf16"
    reading.means(names, {"collectives.grads_format": wire})
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
    default = "full" if old or deepspeed else "selective" if selective else "none"
    kinds = {kind: kind for kind in ("full", "selective", "none")}
    kind = reading.word("recompute_granularity", kinds, default)
    names = f"recompute_granularity recompute_method recompute_num_layers {switches}"
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
