"""Mistakes in files of other programs are errors in three parts, without a traceback."""

import json

import pytest

from frontier_lab.commands import plan
from frontier_lab.foreign.files import LARGEST_FILE, read_run
from frontier_llm.cli.options import run_command
from frontier_llm.errors import ConfigError
from tests.foreign.test_foreign_readings import DEEPSPEED, LLAMA_SCRIPT, LOG, TITAN


def _json(**changes):
    return json.dumps({**DEEPSPEED, **changes})


def _zero(**keys):
    return _json(zero_optimization={"stage": 3, **keys})


BAD = {
    "empty": ("", "empty"),
    "blank": (" \n\n", "empty"),
    "binary": (b"\0\1\2--num-layers", "no text"),
    "utf-16": (LLAMA_SCRIPT.encode("utf-16"), "no text"),
    "latin": (b"python x.py --num-layers 2 \xff", "no text"),
    "prose": ("hello", "another kind"),
    "list": ("[1, 2]", "another kind"),
    "other json": ('{"a": 1}', "keys a"),
    "cut json": (_json()[:40], "JSON with a mistake"),
    "deep json": ('{"zero_optimization": ' * 9000, "JSON with a mistake"),
    "long number": ('{"train_batch_size": ' + "1" * 9000 + "}", "JSON with a mistake"),
    "other toml": ("[a]\nb = 1\n", "keys a"),
    "double toml": (TITAN + "[model]\n", "TOML with a mistake"),
    "huge script": (LLAMA_SCRIPT + "# x\n" * LARGEST_FILE, "more than"),
    "words": (LLAMA_SCRIPT.replace("layers 48", "layers many"), "--num-layers"),
    "zero ranks": (LLAMA_SCRIPT.replace("size $TP", "size 0"), "--tensor-model-parallel-size"),
    "product": (LLAMA_SCRIPT.replace("TP:-4", "TP:-3"), "a multiple of tensor 3 x pipeline 2"),
    "chunks": (LLAMA_SCRIPT.replace("stage 6", "stage 5"), "a divisor of 48 layers / 2 stages"),
    "experts": (LLAMA_SCRIPT.replace("--swiglu", "--swiglu --num-experts 8"), "dense"),
    "offloaded": (LLAMA_SCRIPT.replace("--swiglu", "--optimizer-cpu-offload"), "on the device"),
    "norm": (LLAMA_SCRIPT.replace("RMSNorm", "Norm"), "one of LayerNorm, RMSNorm"),
    "positions": (LLAMA_SCRIPT.replace("rope", "here"), "one of learned_absolute"),
    "dropout": (LLAMA_SCRIPT.replace("dropout 0.0", "dropout 3"), "from 0 to 1"),
    "no number": (LLAMA_SCRIPT.replace("dropout 0.0", "dropout nan"), "from 0 to 1"),
    "two formats": (LLAMA_SCRIPT.replace("--bf16", "--bf16 --fp16"), "one of bf16 and fp16"),
    "log": (LOG.replace("...... 2048", "...... wide"), "hidden_size"),
    "log's ranks": (LOG.replace("...... 16\n0: ----", "...... 6\n0: ----"), "a multiple of tensor"),
    "flavor": (TITAN.replace("70B", "71B"), "llama3 405B"),
    "degrees": (TITAN.replace("degree = 4", "degree = 0"), "tensor_parallel_degree"),
    "no shards": (TITAN.replace("shard_degree = 8", "shard_degree = 0"), "they give 0"),
    "text": (TITAN.replace("seq_len = 8192", 'seq_len = "long"'), "training.seq_len"),
    "date": (TITAN.replace("seq_len = 8192", "seq_len = 1979-05-27"), "training.seq_len"),
    "infinite": (TITAN.replace("seq_len = 8192", "seq_len = inf"), "training.seq_len"),
    "mode": (TITAN.replace('"full"', '"some"'), "one of none, full, selective"),
    "stage": (_zero(stage=4), "0 to 3"),
    "offload": (_zero(offload_optimizer={"device": "cpu"}), "on the device"),
    "nvme": (_zero(offload_param={"device": "nvme", "path": "/x"}), "on the device"),
    "batches": (_json(gradient_accumulation_steps=0), "gradient_accumulation_steps"),
    "negative": (_json(train_batch_size=-1), "train_batch_size"),
    "true": (_json(train_batch_size=True), "train_batch_size"),
    "fraction": (_json(train_batch_size=2.5), "train_batch_size"),
    "both formats": (
        _json(bf16={"enabled": True}, fp16={"enabled": True}), "one of bf16.enabled and fp16"
    ),
    "switch": (_json(bf16={"enabled": "yes"}), "true or false"),
    "format": (_json(communication_data_type="int3"), "one of fp32"),
}  # fmt: skip


GIVEN = {name for name, (text, _) in BAD.items() if isinstance(text, str) and text[:1] == "{"}
"""Files without a model."""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_error_in_three_parts(tmp_path, capsys, name):
    text, words = BAD[name]
    path = tmp_path / "run"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    given = ["cluster=h100_8", "model=llama_7b"] if name in GIVEN else []
    code = run_command(lambda: plan.main(["--from", str(path), *given]))
    message = capsys.readouterr().err
    assert code == 2
    assert words in message, message
    assert all(part in message for part in ("got:", "wants:", "do:"))
    assert "Traceback" not in message


def test_batches_that_do_not_multiply_to_the_ranks_are_refused(tmp_path):
    (tmp_path / "run").write_text(_json())
    with pytest.raises(ConfigError, match="train_batch_size") as caught:
        read_run(tmp_path / "run", None, {"model": "llama_7b", "launch.ranks": "64"})
    assert caught.value.wants == "2 x 4 accumulated x 64 data ranks, 512"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "No such file"),
        (["."], "no regular file"),
        (["run", "model.layer=3"], "model.layers=VALUE"),
        (["run", "word"], "key=value"),
        (["run", "planner.nodes=x", "cluster=h100_8"], "planner.nodes"),
        (["run", "launch.ranks=0"], "launch.ranks"),
        (["run", "launch.ranks=7"], "a multiple of tensor"),
        (["run"], "cluster (no Megatron-LM file names its machine; one of a100_40g_8"),
        (["run", "cluster=none"], "one of a100_40g_8"),
        (["run", "--html", "x.html"], "--from"),
        (["run", "--table", "x.csv"], "--from"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").write_text(LLAMA_SCRIPT)

    def planned():
        try:
            return plan.main(["--from", *arguments])
        except SystemExit as stop:
            return stop.code

    assert run_command(planned) == 2
    message = capsys.readouterr().err
    assert words in message, message
    assert "Traceback" not in message


def test_values_that_look_like_styles_are_printed_as_they_are(tmp_path, capsys):
    script = LLAMA_SCRIPT.replace("--own-number 7", "--own-number [/red]").replace("rope", "[/b]")
    (tmp_path / "run").write_text(script.replace("--position-embedding-type", "--[/x]"))
    assert run_command(lambda: plan.main(["--from", str(tmp_path / "run")])) == 2
    printed = capsys.readouterr()
    assert "--own-number = [/red]" in printed.out
    assert "--[/x] = [/b]" in printed.out
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(("given", "named"), [([], True), (["model=llama_7b"], False)])
def test_a_given_model_needs_no_sizes_from_the_file(tmp_path, capsys, given, named):
    (tmp_path / "run").write_text(LLAMA_SCRIPT.replace("--num-layers 48", ""))
    assert run_command(lambda: plan.main(["--from", str(tmp_path / "run"), *given])) == 2
    assert ("model.layers" in capsys.readouterr().err) == named


def test_a_bad_model_config_is_refused(tmp_path):
    (tmp_path / "run").write_text(_json())
    for text, words in [("{}", "model_type"), ('{"model_type": "mixtral"}', "unknown here"),
                        ('{"model_type": "llama"}', "lacks"), ("[1", "config.json")]:  # fmt: skip
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_run(tmp_path / "run", None, {})
