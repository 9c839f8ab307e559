"""Commands of a script that may or may not run: decided where they can be, else named."""

import pytest

from frontier_lab.foreign.files import read_run, started
from frontier_lab.foreign.shell_words import EXIT, MOST_CALLS, read_script
from frontier_llm.errors import ConfigError
from tests.foreign.test_foreign_readings import _has, _read

SIZES = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("N=2\n[ $N -gt 1 ] && A=x || A=y\nf $A", ["f", "x"]),
        ("N=1\n[[ $N -gt 1 ]] && A=x || A=y\nf $A", ["f", "y"]),
        ("N=3\n(( N > 2 )) &&\n  A=x\nf $A", ["f", "x"]),
        ("[ -z \"$N\" ] && N=4\nf $N", ["f", "4"]),
        ("cd /x || { A=1; B=2; }\nA=3\nf $A $B", ["f", "3", "$B"]),
        ("mkdir a && cd a && f b", ["f", "b"]),
        ("X=$(date) && f b", ["f", "b"]),
        ("true || A=1\nfalse || B=2\nf $B", ["f", "2"]),
        ("declare -p A >/dev/null 2>&1 || A=(--x)\nf ${A[@]}", ["f", "--x"]),
        ("A=()\ndeclare -p A 2>/dev/null || A=(--x)\nf ${#A[@]}", ["f", "0"]),
        ("M=llama2\nif [[ $M == llama* && 1 = 1 ]]; then f a; else f b; fi", ["f", "a"]),
        ("M=x\nif [[ $M == a || $M == x ]]; then f a; else f b; fi", ["f", "a"]),
        ("M=x\nif [ $M = a -o $M != x ]; then f a; else f b; fi", ["f", "b"]),
        ("if test 2 -lt 3; then f a; fi", ["f", "a"]),
        ("N=0\nwhile [ $N -lt 3 ]; do N=$((N + 1)); done\nf $N", ["f", "3"]),
        ("N=0\nuntil (( N == 2 )); do N=$((N + 1)); done\nf $N", ["f", "2"]),
        ("for N in 1 2 3; do A+=\" $N\"; done\nf $A", ["f", "1", "2", "3"]),
        ("while true; do f a; sleep 1; done", ["sleep", "1"]),
        ("f ${N:?set it} ${M:+--m} x", ["f", "${N:?set it}", "x"]),
        ("N=3\nM=1\nf ${N:?set it} ${M:+--m x}", ["f", "3", "--m", "x"]),
        ("A=(a b)\nf ${A[1]} ${#A[@]} \"${A[*]@Q}\"", ["f", "b", "2", "a b"]),
        ("f $(( ${N:-4} * 2 ))", ["f", "8"]),
        ("g() { [ $1 = 1 ] && return; echo b; }\ng 1\ng 2", ["echo", "b"]),
        ("g() { if [ $1 = 1 ]; then echo $2; return; fi; echo b; }\nf $(g 1 a)", ["f", "a"]),
    ],
)  # fmt: skip
def test_what_can_be_decided_is_decided(script, words):
    read = read_script(script)
    assert read.commands[-1] == words
    assert [text for text in read.undecided if "last value" not in text] == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("[ $U = 1 ] && A=2", "[ $U = 1 ] &&"),
        ("[[ $(hostname) == a* ]] && A=2 || A=3", "[[ $(hostname) == a* ]] &&"),
        ("which nvcc && A=2", "which nvcc &&"),
        ("grep -q x file || A=2", "grep -q x file ||"),
        ("B=$(nproc) || A=2", "B=$(nproc) ||"),
        ("if [ $U = 1 ]; then A=2; fi", "if [ $U = 1 ]"),
        ("if [ $U = 1 ]; then export A=2; else A=3; fi", "if [ $U = 1 ]"),
        ("case $U in a) A=2;; esac", "case $U"),
        ("while read -r line; do A=$line; done < file", "while read -r line"),
        ("for F in $(ls); do A=$((A + 1)); done", "for F in $(ls)"),
        ("for ((i = 0; i < 3; i++)); do A=$i; done", "for ((i = 0; i < 3; i++))"),
        ("set_it() { A=2; }\nif [ $U = 1 ]; then set_it; fi", "if [ $U = 1 ]"),
    ],
)
def test_a_variable_that_may_be_set_is_not_known(command, why):
    script = read_script(f'A=1\n{command}\nf $A "${{A:-4}}" $((A * 2))\n[ -z "$A" ] && f b')
    assert script.commands[-1] == ["f", "${A?}", "${A?}", "$((A * 2))"]
    assert script.undecided[0] == why


def test_a_variable_that_may_be_set_to_its_own_value_is_known():
    script = read_script("A=${A:-1}\nif [ $U = 1 ]; then A=${A:-2}; B=1; fi\nf $A", {"A": ["4"]})
    assert script.commands[-1] == ["f", "4"]
    assert read_script("A='--a'\nif [ $U = 1 ]; then A=\"$A --b\"; fi\nf $A").commands == [
        ["f", "--a"]
    ]


def test_options_that_may_be_given_are_named_and_no_precision_is_assumed(tmp_path):
    lines = "P=--bf16\nif [[ $(hostname) == a* ]]; then P=--fp16; T=2; fi\n"
    run = _read(tmp_path, f"{lines}torchrun x.py {SIZES} $P --tensor-model-parallel-size ${{T:-1}}")
    assert run.missing["precision"] == "no --bf16, --fp16"
    assert run.missing["parallel.tensor"] == "--tensor-model-parallel-size is ${T?} there"
    assert any("options in ${P?}" in note for note in run.notes)
    run = _read(tmp_path, f"torchrun x.py {SIZES} --${{DTYPE}}")
    assert "precision" in run.missing
    assert any("options in --${DTYPE}" in note for note in run.notes)
    run = _read(tmp_path, f"torchrun x.py {SIZES}")
    _has(run, precision="fp32")


def test_options_of_unknown_commands_do_not_end_in_other_options(tmp_path):
    run = _read(tmp_path, f"torchrun x.py {SIZES} $(cat more.txt) --bf16 --seed 1 ${{M%x}}")
    _has(run, data__sequence_length="256", precision="bf16")
    assert any("options in $(cat more.txt); options in ${M%x}" in note for note in run.notes)


LOOP = """TP=2
PP=1
NODES=1
while [[ $# -gt 0 ]]; do
  case "$1" in
    --tp) TP="$2"; shift; shift ;;
    --pp|-p) PP="$2"; shift 2 ;;
    *) echo "unknown: $1"; exit 1 ;;
  esac
done
"""


def test_loops_over_arguments_follow_the_command_line(tmp_path):
    file = tmp_path / "run.sh"
    sizes = "--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP"
    file.write_text(f"{LOOP}torchrun x.py {SIZES} --bf16 {sizes}")
    path, variables = started(f"{file} --tp 4 -p 8")
    _has(read_run(path, None, {}, variables), parallel__tensor="4", parallel__pipeline="8")
    run = read_run(file, None, {})
    _has(run, parallel__tensor="2", parallel__pipeline="1")
    assert any("while [[ $# -gt 0 ]] (planned without arguments)" in note for note in run.notes)
    file.write_text(
        'for A in "$@"; do K=$(echo $A | cut -d= -f1); export "$K"="${A#*=}"; done\nTP=${TP:-1}\n'
        f"torchrun x.py {SIZES} --bf16 --tensor-model-parallel-size $TP"
    )
    path, variables = started(f"{file} TP=4 MBS=1")
    run = read_run(path, None, {}, variables)
    _has(run, parallel__tensor="4")
    assert any('export "$K"=' in note for note in run.notes)


def test_a_script_that_is_started_is_read_with_its_arguments(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "train.sh").write_text(
        f"export MORE=1\npython x.py {SIZES} --bf16 --tensor-model-parallel-size $1 --swiglu $2"
    )
    text = 'TP=4\nMORE=--a\nrun() { cd "$HERE" || exit; X=1 bash "$HERE/lib/train.sh" $TP "$@"; }\n'
    run = _read(tmp_path, f"{text}run --qk-layernorm\necho $MORE")
    _has(run, parallel__tensor="4", model__activation="swiglu", model__qk_norm="head")
    script = read_script(f"{text}run\nf $MORE", folder=tmp_path)
    assert script.commands[-1] == ["f", "--a"]


def test_a_training_that_may_not_be_started_is_planned(tmp_path):
    text = f"if command -v srun; then srun python x.py {SIZES} --bf16; fi"
    run = _read(tmp_path, text)
    _has(run, model__layers="8")
    assert any("if command -v srun" in note for note in run.notes)


def test_names_of_first_versions_and_of_relatives(tmp_path):
    text = ("deepspeed x.py --model-parallel-size 2 --pipe-parallel-size 4 --batch-size 3 --gas 5 "
            "--num-layers 8 --hidden-size 512 --inner-hidden-size 1000 --max-sequence-length 256 "
            "--num-attention-heads 8 --fp16")  # fmt: skip
    run = _read(tmp_path, text, launch__ranks="16")
    _has(run, parallel__tensor="2", parallel__pipeline="4", data__micro_batch="3",
         data__global_batch="30", model__ffn="1000", data__sequence_length="256")  # fmt: skip
    assert run.unknown == []
    assert "--model-parallel-size" in {row[0] for row in run.rows}
    text = ("torchrun x.py --num_layers 8 --hidden_size 512 --glu_activation swiglu --use_rms_norm "
            "--no_tie_embed_logits --position_embedding_type rotary --bf16")  # fmt: skip
    run = _read(tmp_path, text)
    _has(run, model__activation="swiglu", model__norm="rmsnorm", model__tied="false",
         model__positions="rotary", model__bias="false")  # fmt: skip
    _has(_read(tmp_path, f"{text} --use_bias"), model__bias="true")


def test_switches_that_other_patterns_hid_are_noted(tmp_path):
    text = f"torchrun x.py {SIZES} --bf16 --fp8-hybrid --zero-bubble-v-schedule"
    notes = " ".join(_read(tmp_path, text).notes)
    assert "--fp8-hybrid (true): planned in 16 bits" in notes
    assert "--zero-bubble-v-schedule (true): planned as 1f1b" in notes
    run = _read(tmp_path, f"deepspeed x.py {SIZES} --fp16 --deepspeed-activation-checkpointing")
    _has(run, recompute="none")
    assert any("--checkpoint-activations switches on" in note for note in run.notes)


def test_gradients_that_are_summed_in_16_bits_are_sent_in_them(tmp_path):
    run = _read(tmp_path, f"torchrun x.py {SIZES} --bf16 --grad-reduce-in-bf16")
    _has(run, planner__engine__sums_bytes="2", collectives__grads_format="bf16")
    assert any("--grad-reduce-in-bf16 (true): planned with states and sums in fp32" in note
               for note in run.notes)  # fmt: skip
    assert "planner.engine.sums_bytes" not in _read(tmp_path, f"torchrun x.py {SIZES}").keys


def test_a_tokenizer_model_of_another_name_has_no_known_size(tmp_path):
    for model, size in (
        ("x/llama/t.model", "32000"),
        ("tokenizer.model", "32000"),
        ("o.model", None),
    ):
        text = f"torchrun x.py {SIZES} --tokenizer-type Llama2Tokenizer --tokenizer-model {model}"
        assert _read(tmp_path, text).keys.get("model.vocabulary") == size


def test_loops_within_loops_end():
    loops = "for I in 1 2 3 4 5 6 7 8 9; do " * 30 + "f" + "; done" * 30
    assert len(read_script(loops).calls) < 2 * MOST_CALLS
    assert len(read_script("while [ 1 = 1 ]; do f; done").commands) < MOST_CALLS
    assert read_script("{ " * 20_000).commands == []
    assert len(read_script("if " * 5_000 + "f").commands) <= 5_000


def test_a_return_ends_the_sourced_file_alone(tmp_path):
    (tmp_path / "lib.sh").write_text("A=7\nreturn 0\nA=8")
    (tmp_path / "once.sh").write_text('[ -n "$ONCE" ] && return\nONCE=1')
    text = "source lib.sh\nsource once.sh\nsource once.sh\nf --n $A"
    assert read_script(text, folder=tmp_path).commands == [["f", "--n", "7"]]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\n(( A = 2 * 4 ))\nf $A", ["f", "8"]),
        ("A=1\n((A++))\n((A*=3))\nlet A=A+1\nf $A", ["f", "7"]),
        ("A=0\nwhile (( A < 3 )); do ((A++)); done\nf $A", ["f", "3"]),
        ("A=1\n((A = U))\nf $A", ["f", "${A?}"]),
        ("A=1\n(( (A += 2) > 1 ))\nf $A", ["f", "${A?}"]),
        ("A=1\nwhile :; do A=$((A*2)); if [ $A = 4 ]; then break; fi; done\nf $A", ["f", "${A?}"]),
        ("A=1\nwhile [ $A -lt 9 ]; do A=$((A*2)); [ $A = 4 ] && break; done\nf $A", ["f", "4"]),
        ("for I in 1 2 3; do [ $I = 2 ] && continue; A+=$I; done\nf $A", ["f", "13"]),
        ("A=1\ng() { local A=3; B=$A; }\ng\nf $A $B", ["f", "1", "3"]),
        ("g() { local A=3; }\ng\nf ${A:-5}", ["f", "5"]),
        ("A=4\nunset A\nf ${A:-2}", ["f", "2"]),
        ("A=1\nread A B <<< 'x y'\nf $A", ["f", "${A?}"]),
        ("A=1\nprintf -v A %s 3\nf $A", ["f", "${A?}"]),
        ("A=(1 2)\nA[0]=3\nf $A", ["f", "${A?}"]),
    ],
)
def test_a_variable_has_the_value_that_bash_gives_or_none(script, words):
    assert read_script(script).commands[-1] == words


def test_an_exit_is_named():
    script = read_script("if [ 1 = 1 ]; then f; exit; fi\ng")
    assert (script.commands, script.undecided) == ([["f"], ["g"]], [EXIT])


ENDLESS = "[ 1 = 1 ]"
for _ in range(3):
    ENDLESS = f"while {ENDLESS}; do :; done; [ 1 = 1 ]"


@pytest.mark.parametrize(
    "script",
    [
        ENDLESS,
        "g() { " + "{ " * 45 + "g; " + "} " * 45 + "}\ng",
        "! " * 1500 + "true",
        "[ " + "! " * 1500 + "a ]",
        "g() { echo $(g) $(g); }\nA=$(g)",
        "((" * 30_000,
        '"$(' * 50_000,
        "${${" * 50_000,
        "A=(1 2)\n" + "A=(${A[@]} ${A[@]})\n" * 3000,
        "A='" + "1 " * 50_000 + "'\n" + "f $A\n" * 2000,
        "\n".join(f"cat <<E{number}" for number in range(20_000)),
    ],
)
def test_a_script_without_a_near_end_is_refused(script):
    with pytest.raises(ConfigError, match="too many commands"):
        read_script(script)
