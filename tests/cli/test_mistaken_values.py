"""Messages about mistaken values name the entry or folder, and say what to write instead."""

import json
import math
import os
from pathlib import Path
from unittest import mock

import pytest

from frontier_lab.sweeps.sweep_trials import Trial
from frontier_llm.checkpoint.discovery import find
from frontier_llm.cli import train
from frontier_llm.cli.compose import compose, configured, groups
from frontier_llm.cli.main import take_conf_dir
from frontier_llm.config import decode
from frontier_llm.config.decode import keys
from frontier_llm.config.reading import absent_advice
from frontier_llm.config.rules import check
from frontier_llm.config.synonyms import KEYS
from frontier_llm.data.sentencepiece_tokenizer import SentencePieceTokenizer
from frontier_llm.engine.shard_settings import number_of
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.launch import failure
from frontier_llm.launch.rendezvous import listen

BLEND = ["data=blend", "data.corpora=[{name: w, path: x}, {entry}]"]
ENTRIES = {
    "{name: a, path: x, weight: -1}": ("entry 2 (a)", "weight: -1", "greater than 0", "weight"),
    "x.txt": ("entry 2", "x.txt", "keys are name, kind", "{name: ..."),
    "{name: a, pth: x}": ("entry 2 (a)", "pth: x", "name, kind, path", "did you mean path?"),
    "{path: x}": ("entry 2", "no name", "text", "add name"),
    "{name: a, path: [b, c]}": ("entry 2 (a)", "path: ['b', 'c']", "text or null", "correct path"),
    "{name: a, kind: txt}": ("entry 2 (a)", "kind: txt", "one of stdlib, text", "correct kind"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_wrong_entry_of_a_list_is_named(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(compose([word.replace("{entry}", entry) for word in BLEND]))
    key, got, wants, todo = ENTRIES[entry]
    error = caught.value
    assert error.key == f"data.corpora, {key}"
    assert str(error.got) == got
    assert wants in error.wants
    assert "Input should" not in error.wants
    assert todo in error.todo


@pytest.mark.parametrize("key", ["telemetry.wandb", "plan", "checkpoint", "checkpoint.mode"])
def test_words_that_yaml_reads_as_booleans_need_quotes(key: str) -> None:
    values = compose([])
    *sections, name = key.split(".")
    of = values
    for section in sections:
        of = of[section]
    of[name] = False
    with pytest.raises(ConfigError, match=r"(?s)got: +False.*off.*in a file, .* in quotes"):
        decode(values)
    with pytest.raises(ConfigError) as caught:
        decode({**compose([]), "launch": {**compose([])["launch"], "ranks": True}})
    assert "quotes" not in caught.value.todo


def test_a_printed_configuration_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for mistake in ("trainer.steps=abc", "parallel.tensor=3"):
        with pytest.raises(ConfigError, match=mistake.partition("=")[0]):
            train.main(["--cfg", "job", mistake])
        assert mistake.partition(".")[2].replace("=", ": ") in capsys.readouterr().out
    assert train.main(["--cfg", "job"]) == 0


@pytest.mark.parametrize("given", ["mine/experiment", "."])
def test_the_configuration_directory_is_found(tmp_path: Path, monkeypatch, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "a.yaml").write_text("# @package _global_\n")
    (tmp_path / "empty").mkdir()
    with mock.patch.dict(os.environ):
        with pytest.raises(ConfigError) as caught:
            take_conf_dir(["train", "--conf-dir", given])
        assert caught.value.todo == f"write --conf-dir {tmp_path / 'mine'}"
        assert take_conf_dir(["train", "--conf-dir", "mine"]) == ["train"]
        assert take_conf_dir(["train", "--conf-dir", "empty"]) == ["train"]
        (tmp_path / "empty" / "a.yaml").write_text("steps: 1\n")
        with pytest.raises(ConfigError, match=r"DIR/experiment/mine.yaml"):
            take_conf_dir(["train", "--conf-dir", "empty"])


@pytest.mark.parametrize(
    ("key", "path", "advice"),
    [
        ("data.path", "https://x.org/a.txt", "download it first"),
        ("data.path", "texts/*.txt", "patterns are not read: name the folder"),
        ("data.path", "a,b", "use several corpora: data=blend"),
        ("data.path", "a", "relative paths begin in"),
        ("data.tokenizer", "google/t5-v1_1-base", "hf download google/t5-v1_1-base"),
        ("data.tokenizer", "own.model", "relative paths begin in"),
        ("run.init_from", "google/t5-v1_1-base", "frontier-llm convert --from hf DIR"),
    ],
)
def test_a_path_that_is_none_gets_advice(key: str, path: str, advice: str) -> None:
    assert advice in absent_advice(key, path)
    assert ("hf download" in absent_advice(key, path)) == ("google" in path)


WORDS = {
    "--train-iters 10": "write trainer.steps=10",
    "--micro-batch-size=4": "write data.micro_batch=4",
    "--bf16": "write precision=bf16",
    "--config foo.yaml": "write --conf-dir DIR experiment=NAME",
    "--deepspeed ds.json": "frontier-llm plan --from FILE",
    "trainer.foo=1": "choose a key of frontier-llm train --help trainer",
    "optimizer.betas=0.9,0.95": "did you mean optimizer.beta",
    f"data={__file__}": f"write data=text data.path={__file__}",
    __file__: f"write data=text data.path={__file__}",
    "data.path=/tmp/my corpus": """write 'data.path="/tmp/my corpus"'""",
    "optimizer.rate_factors.embedding=1,2": "start two runs, or a sweep",
    "data.path=/tmp/text trainer.step": "write trainer.steps=VALUE",
    "data.path=/tmp/text lr 1e-4": "write optimizer.learning_rate=VALUE",
    "data.cache_dir=/tmp/x": "choose a key of frontier-llm train --help data",
    "checkpoint.tiers.archive.path=/tmp/x": "choose a key of frontier-llm train --help checkpoint",
    "telemetry.directory=/tmp/x": "did you mean data.directory?",
    "optimizer.rate_factor=2": "did you mean optimizer.rate_factors?",
    "lr=1e-4": "did you mean optimizer.learning_rate?",
    "train_micro_batch_size_per_gpu=4": "did you mean data.micro_batch?",
    "zero_optimization.stage=3": "did you mean sharding=zero3?",
    "training.local_batch_size=4": "did you mean data.micro_batch?",
    "gradient_accumulation_steps=4": "did you mean data.global_batch? (samples per step: ",
    "gradient_accumulation=4": "did you mean data.global_batch? (samples per step: ",
    "model.tie_word_embeddings=true": "did you mean model.tied?",
    "trainer.steps=1e3": "write trainer.steps=1000",
    "data.path=my book.txt": """write 'data.path="my book.txt"'""",
    "data.path=a b c trainer.steps=1": """write 'data.path="a b c"'""",
    "data.path=a(b),c": """quote the value: 'data.path="a(b),c"'""",
    "data.corpora=[{name: a, path: b}] plan=off": "value: 'data.corpora=[{name: a, path: b}]",
    "data.micro_batch=choice(1,2": "quote the value: 'data.micro_batch=choice(1,2)'",
    "planner.nodes=[1,2": "quote the value: 'planner.nodes=[1,2]'",
    "data.corpora=[{name=a}]": "quote the value: 'data.corpora=[{name: a, path: A}]'",
    "trainer.steps": "write trainer.steps=VALUE;",
    "trainer.steps = 5": "write trainer.steps=5, without blanks",
    "trainer.steps =5 plan=off": "write trainer.steps=5, without blanks",
    "plan=off trainer.steps= 5": "write trainer.steps=5, without blanks",
    "model=gpt2": "did you mean model=gpt_125m? Published weights are converted first: ",
}
"""Words as a user types them without quotes, and the advice."""


@pytest.mark.parametrize("words", WORDS)
def test_words_without_quotes_and_of_other_programs_get_advice(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(compose(words.split()))
    assert WORDS[words] in caught.value.todo
    assert "viable" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("trainer.steps = 5", "trainer.steps=5"),
        ("data.corpora =[{name: a, path: b}]", "'data.corpora=[{name: a, path: b}]'"),
    ],
)
def test_blanks_beside_the_equals_sign_are_named(word: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([word])
    assert caught.value.todo == f"write {setting}, without blanks"
    assert compose(["data.path= a"])["data"]["path"] == "a"
    assert compose(["data.path=", "trainer.steps=5"])["trainer"]["steps"] == 5


def test_a_key_of_an_encoder_decoder_is_refused_with_a_way_out() -> None:
    words = ["model=gpt_tiny", "data.decoder_length=16"]
    with pytest.raises(ConfigError) as caught:
        configured(words)
    setting = "model=mt5_tiny data.objective=spans"
    assert f"or write {setting} instead of model=gpt_tiny" in caught.value.todo
    config = configured([*setting.split(), *words[1:], "parallel.pipeline=1"]).config
    check(config, 1)


def test_names_of_other_programs_stand_for_keys_that_exist() -> None:
    known = {key for key, _, _ in keys()}
    sections = {key.rpartition(".")[0] for key in known}
    assert {key.partition("=")[0] for key in KEYS.values()} <= {*known, *sections, *groups()}
    assert not KEYS.keys() & {key.rpartition(".")[2] for key in known}
    for setting in (key for key in KEYS.values() if "=" in key):
        decode(compose([setting]))


def test_several_paths_are_corpora() -> None:
    for override in ("data.path=[a,b]", "data.corpora=a"):
        with pytest.raises(ConfigError, match=r"data.corpora=\[\{name: a, path: A\}"):
            decode(compose(["data=text", override]))


def test_a_broken_tokenizer_prints_nothing_of_its_library(tmp_path: Path, capfd) -> None:
    (tmp_path / "own.model").write_text("broken")
    with pytest.raises(ConfigError, match="a sentencepiece model"):
        SentencePieceTokenizer(tmp_path / "own.model")
    assert capfd.readouterr() == ("", "")


def test_failures_say_how_to_go_on(tmp_path: Path) -> None:
    assert "repeat the command with the same run.dir" in failure.died(1, -9, 0.0).message
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint yet\n  do: .*checkpoint=lazy"):
        find(tmp_path)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match=rf"port {port} .*launch.port .*--master-port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("rate", ["1e-3", None, -1.0, math.nan, [1e-3]])
def test_a_learning_rate_that_is_no_number_is_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match=r"(?s)learning rate.*a number from 0 on.*float\(\)"):
        number_of(rate)
    assert number_of(1) == 1.0


def test_a_sweep_shows_the_value_that_it_optimises() -> None:
    known = {"overrides": [], "status": "done", "reason": "", "tokens_per_second": 5e3,
             "seconds": 1.0, "peak_bytes": None, "loss": 3.0, "validation_loss": 2.5}  # fmt: skip
    assert json.dumps([Trial(**known, goal="loss").number, Trial(**known).number]) == (
        '["2.5000", "5.00k"]'
    )
    assert Trial(**{**known, "validation_loss": None}, goal="loss").number == "-"
