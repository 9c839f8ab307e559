"""What files of other programs mean here, read by hand; what is not known is named."""

import json

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_lab.foreign.files import read_run
from frontier_lab.foreign.shell_words import read_script

LLAMA_SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 --gpus-per-node=8
# Llama, don't panic
TP=${TP:-4}
GPUS_PER_NODE=8; NNODES=4
WORLD=$(($GPUS_PER_NODE * NNODES))
CHECKPOINT=$1
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 4096   # width
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAIN_ARGS="--micro-batch-size 2 --global-batch-size 512 \\
  --bf16 --lr 3e-4 --tokenizer-type GPT2BPETokenizer"
if [ "$TP" -gt 1 ]; then
  MODEL_ARGS+=(--sequence-parallel)
else
  MODEL_ARGS+=(--num-experts 8)
fi
if [ "$SOMETHING" = yes ]; then TRAIN_ARGS="$TRAIN_ARGS --fp8-format hybrid"; fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=$NNODES pretrain_gpt.py "${MODEL_ARGS[@]}" \\
  $TRAIN_ARGS --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 \\
  --num-layers-per-virtual-pipeline-stage 6 --use-distributed-optimizer --recompute-activations \\
  --overlap-grad-reduce --save "$CHECKPOINT" --own-switch --own-number 7 2>&1 | tee log.txt
"""
LOG = """[default0]:using world size: 16, data-parallel-size: 4
0: ------------------------ arguments ------------------------
0:   accumulate_allreduce_grads_in_fp32 .............. True
0:   adam_beta1 ...................................... 0.9
0:   add_bias_linear ................................. True
0:   attention_backend ............................... AttnBackend.unfused
0:   bf16 ............................................ True
0:   data_parallel_size .............................. 4
0:   ffn_hidden_size ................................. 8192
0:   fp16 ............................................ False
0:   fp8 ............................................. None
0:   global_batch_size ............................... 64
0:   group_query_attention ........................... False
0:   hidden_dropout .................................. 0.1
0:   hidden_size ..................................... 2048
0:   kv_channels ..................................... 128
0:   micro_batch_size ................................ 4
0:   moe_router_topk ................................. 2
0:   new_feature ..................................... None
0:   new_number ...................................... 3
0:   num_attention_heads ............................. 16
0:   num_experts ..................................... None
0:   num_layers ...................................... 24
0:   num_query_groups ................................ 1
0:   pipeline_model_parallel_size .................... 4
0:   position_embedding_type ......................... learned_absolute
0:   recompute_granularity ........................... full
0:   recompute_method ................................ uniform
0:   recompute_num_layers ............................ 1
0:   seq_length ...................................... 1024
0:   tensor_model_parallel_size ...................... 1
0:   use_distributed_optimizer ....................... False
0:   vocab_size ...................................... None
0:   world_size ...................................... 16
0: -------------------- end of arguments ---------------------
 > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)
"""
DEEPSPEED_SCRIPT = """
options=" --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \\
 --micro-batch-size 4 --fp16 --vocab-size 51200 --tensor-model-parallel-size 2 \\
 --checkpoint-activations --deepspeed --deepspeed_config ds.json --zero-stage 2"
cat <<EOT > ds.json
{"zero_optimization": {"stage": 2}, "it's": "not read"}
EOT
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py ${options}
"""
TITAN = """
[job]
description = "mine"
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 4
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 4
own_degree = 3
[activation_checkpoint]
mode = "full"
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "train_batch_size": 256,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "own_key": 1,
    },
    "steps_per_print": 10,
}


def _read(tmp_path, text, **given):
    (tmp_path / "run").write_text(text if isinstance(text, str) else json.dumps(text))
    model = {"model": "llama_7b"} if isinstance(text, dict) else {}
    given = {key.replace("__", "."): value for key, value in given.items()}
    return read_run(tmp_path / "run", None, model | given)


def _has(run, **keys):
    wanted = {key.replace("__", "."): value for key, value in keys.items()}
    assert {key: run.keys.get(key) for key in wanted} == wanted


def test_a_megatron_script_with_arrays_variables_and_conditions(tmp_path):
    run = _read(tmp_path, LLAMA_SCRIPT)
    assert (run.program, run.engine, run.ranks, run.missing) == (
        "Megatron-LM",
        "megatron_core",
        32,
        {},
    )
    _has(run, parallel__tensor="4", parallel__pipeline="2", parallel__chunks="4",
         parallel__schedule="interleaved", parallel__sequence="true", parallel__context="1",
         model__layers="48", model__ffn="10880", model__kv_heads="8", model__head_dim="128",
         model__activation="swiglu", model__norm="rmsnorm", model__bias="false",
         model__tied="false", model__positions="rotary", model__vocabulary="50688",
         model__dropout="0", data__micro_batch="2", data__global_batch="512",
         data__sequence_length="4096", precision="bf16", recompute="selective",
         sharding__optimizer="all", sharding__grads="1", sharding__params="1",
         collectives__grads_format="fp32", planner__engine__overlaps="true",
         planner__engine__fused_attention="true")  # fmt: skip
    assert run.unknown == ["--own-switch = true", "--own-number = 7"]
    assert {"--lr", "--save"} <= set(run.ignored)
    assert [note for note in run.notes if "SOMETHING" in note]
    assert ("--swiglu", "true", "model.activation=swiglu") in run.rows
    assert ("--kv-channels", "(default)", "model.head_dim=128") in run.rows


def test_a_log_of_megatron(tmp_path):
    run = _read(tmp_path, LOG)
    assert (run.ranks, run.missing, run.unknown) == (16, {}, ["new_number = 3"])
    _has(run, model__layers="24", model__kv_heads="16", model__ffn="8192", model__bias="true",
         model__qkv_bias="true", model__tied="true", model__vocabulary="50304",
         model__positions="learned", model__dropout="0.1", recompute="full",
         parallel__pipeline="4", parallel__schedule="1f1b", sharding__optimizer="1",
         planner__engine__fused_attention="false", planner__engine__overlaps="false",
         precision="bf16", collectives__grads_format="fp32")  # fmt: skip
    assert {"adam_beta1", "moe_router_topk"} <= set(run.ignored)


def test_a_script_of_megatron_deepspeed(tmp_path):
    run = _read(tmp_path, DEEPSPEED_SCRIPT)
    assert (run.program, run.engine, run.ranks) == ("Megatron-DeepSpeed", "deepspeed", 16)
    _has(run, sharding__optimizer="all", sharding__grads="all", sharding__params="1",
         recompute="full", precision="fp16", collectives__grads_format="bf16",
         planner__engine__fused_attention="false", data__global_batch="32",
         model__activation="gelu", model__ffn="8192")  # fmt: skip


@pytest.mark.parametrize(
    ("switches", "engine"),
    [
        ("--DDP-impl local", "megatron_2021"),
        ("--DDP-impl local --sequence-parallel", "megatron_2022"),
        ("--use-mcore-models", "megatron_core"),
    ],
)
def test_arguments_of_old_versions_choose_the_engine(tmp_path, switches, engine):
    words = "--num-layers 2 --hidden-size 64 --tensor-model-parallel-size 2 "
    run = _read(tmp_path, f"torchrun --nproc_per_node 2 pretrain_gpt.py {words}{switches}")
    assert run.engine == run.keys["planner.engine"] == engine
    assert bool(run.engine_note) == (engine == "megatron_core")


def test_uneven_stages_of_megatron(tmp_path):
    words = "--num-layers 14 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2"
    run = _read(tmp_path, f"torchrun pretrain_gpt.py {words}")
    _has(run, parallel__layers_per_stage="[2,4,4,4]")
    run = _read(tmp_path, f"torchrun pretrain_gpt.py {words} --decoder-last-pipeline-num-layers 4")
    _has(run, parallel__layers_per_stage="[2,4,4,4]")


ENDS = {
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "chunks", "settings", "words"),
    [
        (12, 2, {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 4},
         "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4"
         " --num-virtual-stages-per-pipeline-rank 2"),
        (15, 1, {"account_for_loss_in_pipeline_split": True},
         "--account-for-loss-in-pipeline-split"),
        (14, 2, ENDS, "--account-for-loss-in-pipeline-split"
         " --account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2"),
        (6, 2, ENDS, "--account-for-loss-in-pipeline-split"
         " --account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 1"),
    ],
)  # fmt: skip
def test_uneven_chunks_are_those_of_megatron_core(tmp_path, layers, chunks, settings, words):
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32, **settings,
    )  # fmt: skip
    virtual = range(chunks) if chunks > 1 else (None,)
    wanted = [get_num_layers_to_build(config, v, stage) for v in virtual for stage in range(4)]
    assert sum(wanted) == layers
    script = f"torchrun pretrain_gpt.py --pipeline-model-parallel-size 4 --num-layers {layers}"
    run = _read(tmp_path, f"{script} {words}")
    _has(run, parallel__layers_per_stage=str(wanted).replace(" ", ""))


def test_what_a_script_leaves_open_is_missing_unless_it_is_given(tmp_path):
    script = "python pretrain_gpt.py --num-layers $LAYERS --hidden-size 64 --seq-length 128"
    run = _read(tmp_path, script)
    assert run.missing["model.layers"] == "--num-layers is $LAYERS there"
    assert {"model.heads", "model.vocabulary", "data.micro_batch"} <= run.missing.keys()
    assert run.ranks is None
    run = _read(tmp_path, script, model__layers="3", planner__nodes="2", cluster="h100_8")
    assert "model.layers" not in run.missing
    assert run.ranks == 16


def test_a_torchtitan_file(tmp_path):
    run = _read(tmp_path, TITAN)
    assert (run.program, run.engine, run.ranks, run.missing) == ("torchtitan", "fsdp", 64, {})
    _has(run, model="llama3_70b", parallel__tensor="4", parallel__sequence="true",
         sharding__params="8", sharding__grads="8", sharding__optimizer="8", recompute="full",
         data__micro_batch="4", data__global_batch="64", data__sequence_length="8192",
         precision="bf16", collectives__grads_format="fp32")  # fmt: skip
    assert run.unknown == ["parallelism.own_degree = 3"]
    assert run.ignored == ["job.description"]
    assert "llm-foundry" in run.engine_note


def test_a_torchtitan_file_with_a_pipeline(tmp_path):
    more = """pipeline_parallel_degree = 4
context_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 7"""
    text = TITAN.replace("shard_degree = 8", "shard_degree = -1").replace("own_degree = 3", more)
    text = text.replace("replicate_degree = 2", "replicate_degree = 1")
    run = _read(tmp_path, text, launch__ranks="64")
    _has(run, parallel__pipeline="4", parallel__chunks="3", parallel__schedule="interleaved",
         parallel__context="2", sharding__params="1", sharding__optimizer="all",
         data__micro_batch="1", data__global_batch="8")  # fmt: skip
    assert _read(tmp_path, text).ranks is None


def test_a_torchtitan_file_of_defaults_is_noted(tmp_path):
    text = '[model]\nflavor = "8B"\nconverters = ["float8"]\n[job]\n[training]\ncompile = true\n'
    run = _read(tmp_path, text, launch__ranks="8")
    _has(run, data__micro_batch="8", data__global_batch="64", recompute="selective",
         sharding__params="all", parallel__sequence="false")  # fmt: skip
    notes = " ".join(run.notes)
    assert all(word in notes for word in ("recompute=full", "model.converters", "training.compile"))


def test_a_deepspeed_file(tmp_path):
    run = _read(tmp_path, DEEPSPEED)
    assert (run.program, run.engine, run.ranks) == ("DeepSpeed", "deepspeed", 32)
    _has(run, sharding__optimizer="all", sharding__grads="all", sharding__params="1",
         data__micro_batch="2", data__global_batch="256", precision="bf16",
         planner__engine__overlaps="true", planner__engine__message_elements="500000000",
         collectives__grads_format="bf16", parallel__tensor="1", recompute="none")  # fmt: skip
    assert run.unknown == ["zero_optimization.own_key = 1"]
    assert run.missing.keys() == {"data.sequence_length"}
    assert "steps_per_print" in run.ignored


def test_a_hugging_face_model_lies_beside_the_file(tmp_path):
    model = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
             "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
             "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "run").write_text(json.dumps(DEEPSPEED))
    run = read_run(tmp_path / "run", None, {})
    _has(run, model__layers="24", model__kv_heads="2", model__ffn="4864", model__tied="true",
         model__qkv_bias="true", model__norm_epsilon="0.000001")  # fmt: skip
    assert "data.sequence_length" in run.missing


@pytest.mark.parametrize("name", ["train_batch_size", "gradient_accumulation_steps"])
def test_the_batch_is_known_if_one_of_two_values_is_auto(tmp_path, name):
    run = _read(tmp_path, {**DEEPSPEED, name: "auto"}, launch__ranks="32")
    assert run.keys["data.global_batch"] == "256"
    assert "data.global_batch" not in run.missing


def test_variants_of_zero(tmp_path):
    zero = {"stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True,
            "zero_quantized_gradients": True}  # fmt: skip
    run = _read(tmp_path, {**DEEPSPEED, "zero_optimization": zero})
    _has(run, planner__engine__second_copy_ranks="8", collectives__params_format="int8",
         collectives__grads_format="int8", collectives__grads_across_format="int4",
         sharding__params="all")  # fmt: skip
    run = _read(tmp_path, {**DEEPSPEED, "zero_optimization": {"stage": 3, "mics_shard_size": 8}})
    _has(run, sharding__params="8", sharding__grads="8", sharding__optimizer="8")
    run = _read(tmp_path, {**DEEPSPEED, "train_micro_batch_size_per_gpu": "auto"})
    assert run.missing["data.micro_batch"] == "train_micro_batch_size_per_gpu is auto there"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nf ${A} \"$A$A\" '$A' \\$A", ["f", "1", "11", "$A", "$A"]),
        ('A=(x "y z")\nf "${A[@]}" ${A[@]}', ["f", "x", "y z", "x", "y", "z"]),
        ('A="x"\nA="$A y"\nA+=" z"\nf $A "$A"', ["f", "x", "y", "z", "x y z"]),
        ("f $((2 * (3 + 4) / 5)) $((X + 1))", ["f", "2", "$((X + 1))"]),
        ("f ${X:-4} ${Y:-${Z:-5}} ${W}", ["f", "4", "5", "${W}"]),
        ("f a > out.txt b 2>&1", ["f", "a", "b"]),
        ("if [ 1 = 2 ]; then f a; elif [[ 2 -ge 1 ]]; then f b; else f c; fi", ["f", "b"]),
        ("if [ 1 = 2 ] || [ -z '' ]; then f a; else f b; fi", ["f", "a"]),
        ("if [ $U = 2 ]; then f a; else f b; fi\nf c", ["f", "c"]),
        ("bash -c 'f --a 1'", ["bash", "-c", "f", "--a", "1"]),
    ],
)
def test_words_of_shell_commands(script, words):
    assert read_script(script).commands[-1] == words


def test_no_branch_of_an_unknown_condition_is_read():
    script = read_script("if [ $U = 2 ]; then f --a; elif [ 1 = 1 ]; then f b; else f c; fi\nf d")
    assert (script.commands, script.undecided) == ([["f", "d"]], ["if [ $U = 2 ]"])
