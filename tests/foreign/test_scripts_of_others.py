"""Scripts as people write them: batch variables, functions, arguments, files, open values."""

import pytest

from frontier_lab.commands import plan
from frontier_lab.foreign.files import read_run, started
from frontier_lab.foreign.shell_words import MOST_CALLS, read_script
from frontier_llm.cli.options import run_command
from frontier_llm.errors import ConfigError
from tests.foreign.test_foreign_readings import DEEPSPEED, TITAN, _has, _read

SIZES = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256"
BATCH = """#!/bin/bash
#SBATCH --nodes=6            # nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:4
"""


def _planned(tmp_path, capsys, text, *given, name="run"):
    """Return the exit code and everything that `plan --from` prints."""
    (tmp_path / name).write_text(text)
    code = run_command(lambda: plan.main(["--from", str(tmp_path / name), *given]))
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("M=s\ncase $M in\n s|m)\n L=3 ;;\n l) L=9;;\nesac\nf $L", ["f", "3"]),
        ("M=l\ncase $M in s|m) L=3;; l*) L=9;; *) L=1;; esac; f $L", ["f", "9"]),
        ("M=x\ncase \"$M\" in s) L=3;; *) L=1;; esac\nf $L", ["f", "1"]),
        ("for N in 1 2 4; do f $N; done", ["f", "4"]),
        ("declare -a A=( --x 1 -y 2 )\nf ${A[@]}", ["f", "--x", "1", "-y", "2"]),
        (': "${N:=4}"\nf $N', ["f", "4"]),
        ("N=3\nif (( N > 2 )); then f a; else f b; fi", ["f", "a"]),
        ("N=3\nf $(( $N > 2 ? 5 : 6 )) $((N < 2))", ["f", "5", "0"]),
        ('if [ -z "$N" ]; then N=7; fi\nf $N', ["f", "7"]),
        ("if ! [ 1 = 2 ]; then f a; fi", ["f", "a"]),
        ("g() { local n=$1; shift; f $n \"$@\"; }\ng 1 2 'a b'", ["f", "1", "2", "a b"]),
        ("function g {\n f $1\n}\nA=1\ng $A", ["f", "1"]),
        ("g()\n{\n cd x || { exit; }\n if [ $1 = 1 ]; then f a; fi\n}\ng 1", ["f", "a"]),
        ('g() { echo x; echo "$1 --n 2"; }\nA=$(g 1)\nf $A', ["f", "1", "--n", "2"]),
        ("f a `# a comment` b", ["f", "a", "b"]),
        ("set_it() { N=2; }\nset_it\nf $N", ["f", "2"]),
        ("late() { f --a $N; }\nfirst() { N=2; }\n", ["f", "--a", "$N"]),
        ("f $@ x", ["f", "$@", "x"]),
        ('A="--a $(g "$X" --b 1) --c"\nf $A', ["f", "--a", '$(g "$X" --b 1)', "--c"]),
    ],
)  # fmt: skip
def test_words_of_longer_scripts(script, words):
    assert read_script(script).commands[-1] == words


def test_what_is_open_is_noted_only_if_it_matters():
    noise = 'if [ -f "$F" ]; then exit 1; fi\nif [ $C -ne 0 ]; then echo no; fi\n'
    assert read_script(noise).undecided == []
    assert read_script("if [ -f $F ]; then A=1; fi").undecided == ["if [ -f $F ]"]
    assert read_script("case $M in a) A=1;; b) A=2;; esac\nf $A").undecided == ["case $M"]
    assert "last value" in read_script("for N in 1 2; do f; done").undecided[0]


def test_scripts_that_call_themselves_end(tmp_path):
    assert MOST_CALLS < len(read_script("f() { f; f; }\nf x").calls) < 2 * MOST_CALLS
    (tmp_path / "a.sh").write_text("source a.sh\n" * 9)
    assert read_script("source a.sh\ng", folder=tmp_path).commands == [["g"]]
    run = _read(tmp_path, "\n" * 200_000 + f"--x: {' ' * 50_000}y\npython x.py {SIZES}")
    _has(run, model__layers="8")


def test_sourced_files_beside_the_script_are_read(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "sizes.sh").write_text("LAYERS=5\nadd() { ARGS+=($@); }\n")
    for path in ("env/sizes.sh", "${HERE}/env/sizes.sh", "$(dirname $0)/env/sizes.sh"):
        script = f"source {path}\nadd --n $LAYERS\nf ${{ARGS[@]}}"
        assert read_script(script, folder=tmp_path).commands == [["f", "--n", "5"]]
    script = read_script("source ../other.sh\n. $X\nf", folder=tmp_path)
    assert (script.commands, script.unread) == ([["f"]], ["../other.sh", "$X"])


def test_a_script_without_arguments_may_source_them(tmp_path):
    (tmp_path / "more.sh").write_text(
        f"args() {{ echo {SIZES} --tensor-model-parallel-size=$TP; }}"
    )
    run = _read(tmp_path, '. ./more.sh\nTP=2\ncmd="x.py $(args)"\nbash -c "$cmd" | tee log\n')
    _has(run, model__layers="8", parallel__tensor="2", data__sequence_length="256")


def test_slurm_sets_variables_from_the_options_of_a_batch_script(tmp_path):
    launch = "torchrun --nproc-per-node $SLURM_GPUS_ON_NODE --nnodes ${SLURM_NNODES} x.py"
    run = _read(
        tmp_path, f"{BATCH}{launch} {SIZES} --tensor-model-parallel-size $SLURM_GPUS_PER_NODE"
    )
    _has(run, parallel__tensor="4")
    assert run.ranks == 24
    assert ("(launcher)", "24", "24 ranks") in run.rows


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        (BATCH + "srun python x.py", 24),
        (BATCH + "torchrun --nproc_per_node $UNKNOWN x.py", 24),
        (BATCH.replace("node=1", "node=4") + "srun python x.py", 24),
        ("mpirun -np 12 --npernode 4 python x.py", 12),
        ("mpiexec -n 12 -ppn 4 python x.py", 12),
        ("#SBATCH -N4 --gpus=16\nsrun python x.py", 16),
        ("torchrun --nnodes $N2 --nproc_per_node 8 x.py", None),
    ],
)
def test_the_number_of_processes_of_launchers(tmp_path, launch, ranks):
    assert _read(tmp_path, f"{launch} {SIZES}").ranks == ranks


def test_a_script_with_its_arguments_and_variables(tmp_path, capsys):
    script = f"TP=$1\nPP=${{2}}\nx=x.py\npython $x {SIZES} --tensor-model-parallel-size $TP "
    (tmp_path / "run.sh").write_text(script + "--pipeline-model-parallel-size $PP --bf16 $MORE")
    path, variables = started(f"MORE='--swiglu --fp8-format hybrid' bash {tmp_path}/run.sh 4 2")
    run = read_run(path, None, {}, variables)
    _has(run, parallel__tensor="4", parallel__pipeline="2", precision="bf16",
         model__activation="swiglu")  # fmt: skip
    assert not [note for note in run.notes if "arguments" in note]
    run = _read(tmp_path, (tmp_path / "run.sh").read_text())
    _has(run, precision="bf16")
    assert any("options in $MORE" in note for note in run.notes)
    assert any("--from 'run ARGUMENT ...'" in note for note in run.notes)
    with pytest.raises(ConfigError, match="quotation"):
        started("run.sh 'a")


def test_variables_of_unknown_value_take_no_option_from_the_plan(tmp_path):
    text = f"torchrun x.py --bf16 $A {SIZES} ${{B[@]}} --swiglu $@ 2>&1 | tee log"
    run = _read(tmp_path, text)
    _has(run, precision="bf16", model__activation="swiglu", data__sequence_length="256")
    assert "options in $A; options in ${B[@]}; options in $@" in " ".join(run.notes)
    run = _read(tmp_path, f'cmd="x.py {SIZES} --bf16 |& tee log"\neval $cmd')
    _has(run, precision="bf16")


def test_line_ends_of_other_systems_and_options_of_yaml(tmp_path):
    array = "A=(\n --num-layers 8  # depth\n # --bf16\n --fp16\n)\n"
    text = f"{array}torchrun x.py ${{A[@]}} \\\n --swiglu\n"
    for script in (text, text.replace("\n", "\r\n")):
        (tmp_path / "run").write_bytes(script.encode())
        run = read_run(tmp_path / "run", None, {})
        _has(run, model__layers="8", precision="fp16", model__activation="swiglu")
    options = {"num-layers": "8", "swiglu": "true  # gated", "bf16": "true", "hidden-size": "512"}
    lines = "".join(f"  --{name}: {value}\n" for name, value in options.items())
    run = _read(tmp_path, f"ENV:\n  X: 1\nMODEL_ARGS:\n{lines}")
    _has(run, model__layers="8", precision="bf16", model__activation="swiglu", model__hidden="512")


@pytest.mark.parametrize(
    ("options", "vocabulary"),
    [
        ("--tokenizer-type GPT2BPETokenizer", "50304"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file a/gpt2-vocab.json", "50304"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file $3", "50304"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file nordic/vocab.json", None),
        ("--vocab-file a/gpt2-vocab.json", "50304"),
        ("--tokenizer-type HuggingFaceTokenizer", None),
        ("--tokenizer-type NullTokenizer --vocab-size 128", "256"),
        ("--tokenizer-type X --pad-vocab-size-to 1000", "1000"),
        ("--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256", "128512"),
    ],
)
def test_the_vocabulary_of_a_tokenizer(tmp_path, options, vocabulary):
    run = _read(tmp_path, f"torchrun x.py {SIZES} {options}")
    assert run.keys.get("model.vocabulary") == vocabulary
    named = options.split()[1] if "-type" in options else ""
    assert ("model.vocabulary" in run.missing) == (vocabulary is None)
    assert vocabulary is not None or named in run.missing["model.vocabulary"]
    assumed = any("assumed" in note for note in run.notes)
    assert assumed == (vocabulary in ("50304", "128512"))


def test_options_that_only_megatron_deepspeed_has(tmp_path):
    text = (f"deepspeed --num_nodes 2 --num_gpus 8 x.py {SIZES} --deepspeed --zero-stage 0 --bf16 "
            "--normalization rmsnorm --num-key-value-heads 2 "
            "--ds-sequence-parallel-size 2")  # fmt: skip
    run = _read(tmp_path, text)
    _has(run, sharding__optimizer="all", sharding__grads="1", model__norm="rmsnorm",
         model__kv_heads="2", parallel__context="2")  # fmt: skip
    assert run.ranks == 16
    _has(_read(tmp_path, text.replace("--bf16", "--fp16")), sharding__optimizer="1")
    method = "--pp-partition-method 'type:transformer|embedding' --pipeline-model-parallel-size"
    for stages, split in ((5, "[1,2,2,2,1]"), (4, "auto")):
        run = _read(tmp_path, f"{text} {method} {stages}", launch__ranks="40")
        _has(run, parallel__layers_per_stage=split)


def test_defaults_of_a_log_are_neither_unknown_nor_noted(tmp_path):
    values = {"num_layers": 8, "micro_batch_size": 1, "main_grads_dtype": "torch.float32",
              "cross_entropy_fusion_impl": "native", "bias_dropout_fusion": True, "bf16": True,
              "tp_comm_overlap_ag": True, "hybrid_attention_ratio": 0.0, "mamba_state_dim": 128,
              "attention_backend": "AttnBackend.auto"}  # fmt: skip
    lines = "\n".join(f"  {name} {'.' * 20} {value}" for name, value in values.items())
    dashes = "-" * 20
    log = f"{dashes} arguments {dashes}\n{lines}\n{dashes} end of arguments {dashes}\n"
    run = _read(tmp_path, log)
    assert (run.unknown, run.notes) == ([], [])
    run = _read(tmp_path, log.replace("torch.float32", "torch.bfloat16"))
    assert "take more memory" in run.notes[0]


def test_an_automatic_attention_is_no_open_value(tmp_path):
    run = _read(tmp_path, f"torchrun x.py {SIZES} --attention-backend auto")
    _has(run, planner__engine__fused_attention="true")
    assert "planner.engine.fused_attention" not in run.missing


def test_old_names_of_torchtitan(tmp_path):
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 3
data_parallel_degree = -1
tensor_parallel_degree = 4
[experimental]
pipeline_parallel_degree = 2
[job]
[float8]
enable_float8_linear = true
"""
    run = _read(tmp_path, text, launch__ranks="32")
    assert any("float8" in note for note in run.notes)
    _has(run, parallel__tensor="4", parallel__pipeline="2", data__global_batch="12")
    assert run.unknown == []
    assert "training.tensor_parallel_degree" in {row[0] for row in run.rows}
    run = _read(tmp_path, text.replace("_degree = 4", "_degree = 4\nlocal_batch_size = 5"),
                launch__ranks="32")  # fmt: skip
    assert run.unknown == ["training.batch_size = 3"]


def test_formats_and_tensor_ranks_of_deepspeed_files(tmp_path):
    files = {**DEEPSPEED, "bf16": {"enabled": False}, "fp8": {"enabled": True}}
    run = _read(tmp_path, files)
    _has(run, precision="bf16")
    assert "fp8.enabled" in " ".join(run.notes)
    run = _read(tmp_path, {**DEEPSPEED, "tensor_parallel": {"autotp_size": 2}})
    _has(run, parallel__tensor="2")
    assert run.ranks == 64
    run = _read(tmp_path, {**DEEPSPEED, "zero_optimization": {"stage": 0}})
    _has(run, sharding__optimizer="all", sharding__grads="1")


EXPERTS = f"torchrun --nproc_per_node 8 x.py {SIZES} --num-experts 4 --micro-batch-size 1"
REFUSED = {
    "experts": (EXPERTS, "model=NAME of conf/model"),
    "mamba": (f"python x.py {SIZES} --hybrid-attention-ratio 0.1", "dense decoders"),
    "images": (f"python x.py {SIZES} --language-model-type=8b", "dense decoders"),
    "ranks": (f"torchrun --nproc_per_node 4 x.py {SIZES} --tensor-model-parallel-size 8",
              "launch.ranks=8"),
    "flavor": (TITAN.replace("llama3", "deepseek_v3"), "not a deepseek_v3"),
    "neox": ('{\n "model-parallel-size": 2,\n}', "GPT-NeoX, which is not read"),
    "sources": ("#!/bin/bash\nsource a.sh\nrun", "it sources a.sh"),
    "bridge": ("model:\n  x: 1\n", "a YAML file, which is not read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_give(tmp_path, capsys, name):
    text, words = REFUSED[name]
    file = {"neox": "a.yml", "bridge": "b.yaml"}.get(name, "run")
    code, printed = _planned(tmp_path, capsys, text, "cluster=h100_8", name=file)
    assert code == 2
    assert words in printed, printed


def test_missing_values_do_not_ask_for_what_follows_from_others(tmp_path):
    run = _read(tmp_path, "python x.py --num-layers 8 --hidden-size $H --num-attention-heads 8")
    assert "model.hidden" in run.missing
    assert not {"model.ffn", "model.head_dim"} & run.missing.keys()
    assert any("--from 'NAME=VALUE ... run'" in note for note in run.notes)
    run = _read(tmp_path, "python x.py --num-layers 8 --hidden-size $H --num-attention-heads 8",
                model__hidden="512")  # fmt: skip
    _has(run, model__ffn="2048", model__head_dim="64")


def test_a_given_model_takes_the_place_of_experts(tmp_path, capsys):
    given = ["cluster=h100_8", "model=gpt_tiny", "planner.tensor=[1]", "planner.pipeline=[1]"]
    code, printed = _planned(tmp_path, capsys, f"{EXPERTS} --bf16 --global-batch-size 8", *given)
    assert code == 0, printed
    assert "--num-experts = 4" in printed
    assert "parameters, 256 tokens per sample" in printed
