"""Every mistake on the command line is one message: the key, what it got, wants, what to do."""

import re
from pathlib import Path

import pytest

from frontier_llm.cli.compose import compose, configured
from frontier_llm.cli.train import configure
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import ConfigError
from frontier_llm.saving import run_directory


def _refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        decode(compose(overrides))
    return caught.value


def test_the_defaults_make_a_run():
    config = decode(compose([]))
    assert (config.model.name, config.launch.ranks) == ("gpt_tiny", 4)


def test_references_are_resolved_once():
    values = compose(["model=gpt_22b"])
    assert re.fullmatch(r"runs/gpt_22b-\d{8}-\d{6}", values["run"]["dir"])
    assert "hydra" not in values
    assert "experiment" not in values


def test_changes_are_allowed_of_keys_sections_and_maps():
    names = "optimizer,data.vocabulary,optimizer.rate_factors.embedding,checkpoint.tiers"
    allowed = compose([f"run.allow_changes=[{names}]"])["run"]["allow_changes"]
    assert allowed == names.split(",")


def test_later_overrides_win_and_groups_keep_single_keys():
    config = decode(compose(["model=gpt_22b", "model.layers=3", "model.layers=5"]))
    assert (config.model.layers, config.model.hidden) == (5, 6144)


@pytest.mark.parametrize(
    ("override", "key", "got", "wants", "todo"),
    [
        ("parallel.tensr=2", "parallel.tensr", "2", "--help` lists", "mean parallel.tensor?"),
        ("modle=gpt_tiny", "modle", "gpt_tiny", "--help` lists", "did you mean model?"),
        ("stepz=3", "stepz", "3", "--help` lists", "did you mean trainer.steps?"),
        ("nodes=2", "nodes", "2", "--help` lists", "did you mean launch.nodes?"),
        ("tensor=2", "tensor", "2", "--help` lists", "did you mean parallel.tensor?"),
        ("path=a.txt", "path", "a.txt", "--help` lists", "did you mean data.path?"),
        ("model=gpt-2", "model", "gpt-2", "gpt_22b, ", "did you mean model=gpt_125m?"),
        ("data=no/book.txt", "data", "no/book.txt", "one of", "data=text data.path=no/book.txt"),
        ("llama_7b", "llama_7b", "without a value", "key=value", "write model=llama_7b"),
        ("--dry-run", "--dry-run", "without a value", "without dashes", "plan=dry_run"),
        ("+new.key=1", "new", "1", "--help` lists", "a key of that list"),
        ("+parallel.tensr=2", "parallel.tensr", "2", "--help` lists", "parallel.tensor?"),
        (
            "~parallel.foo",
            "parallel.foo",
            "removed",
            "--help` lists",
            "choose a key of frontier-llm train --help parallel",
        ),
        ("parallel.tensor.x=3", "parallel.tensor.x", "3", "--help` lists", "parallel.tensor?"),
        ("model=gpt_tny", "model", "gpt_tny", "gpt_22b, ", "did you mean model=gpt_tiny?"),
        ("planner.engine=foo", "planner.engine", "foo", "deepspeed, fsdp", "conf/engine/foo.yaml"),
        ("engine=megatron", "planner.engine", "megatron", "fsdp", "planner.engine=megatron_"),
        ("model=null", "model", "None", "one of", "choose one"),
        ("precision=bf61", "precision", "bf61", "auto, bf16, fp16, fp32", "precision=bf16?"),
        ("experiment=xyzzy", "experiment", "xyzzy", "one of", "conf/experiment"),
        ("trainer.steps", "trainer.steps", "without a value", "key=value", "trainer.steps=VALUE"),
        ("--steps", "--steps", "without a value", "key=value", "--help"),
        ("trainer.steps=[1", "trainer.steps", "[1", "can be read", "quote the value"),
        ("run.dir=a=b", "run.dir", "a=b", "can be read", "quote the value"),
        ("model=gpt_22b,gpt_1t", "model", "gpt_22b,gpt_1t", "one configuration", "two runs"),
        ("model.layers=1,2", "model.layers", "1,2", "one configuration", "two runs"),
        ("model=gpt", "model", "gpt, a base file", "gpt_22b, ", "set model.layers="),
        (
            "model=llama",
            "model",
            "leaves model.layers open",
            "builds on it: llama_7b, llama_13b",
            "choose one, such as model=llama_7b, or",
        ),
        ("checkpoint=base", "checkpoint", "base, a base file", "blocking, lazy, off", "set checkp"),
        (
            "run.allow_changes=[trainr.steps]",
            "run.allow_changes",
            "trainr.steps",
            "keys or sections",
            "did you mean trainer.steps?",
        ),
        ("recompute=???", "recompute", "nothing", "one of none, selective, full", "set recompute="),
        ("trainer.seed=???", "trainer.seed", "nothing", "int", "set trainer.seed="),
        ("run.dir=${nope}", "run.dir", "'nope' not found", "a reference", "correct"),
        ("hydra.verbose=true", "hydra.verbose", "true", "a key of", "run.dir"),
        ("hydra/launcher=x", "hydra/launcher", "x", "a key of", "--help"),
        ("=3", "=3", "3", "a key of", "--help"),
        ("+parallel.tensor=3", "parallel.tensor", "+parallel", "key=value", "parallel.tensor=3"),
        ("~data", "data", "~data, which removes it", "all sections", "leave ~data out, or choose"),
        ("~trainer", "trainer", "~trainer, which", "all sections", "leave ~trainer out"),
        ("~parallel.tensor", "parallel.tensor", "nothing", "a whole number", "tensor=2"),
        ("parallel.tensor=two", "parallel.tensor", "'two' (text)", "a whole number", "tensor=2"),
        ("parallel.tensor=true", "parallel.tensor", "True (true or false)", "a whole", "tensor=2"),
        ("parallel.tensor=0", "parallel.tensor", "0 (a whole number)", "greater than", "=1"),
        ("trainer.steps=1.5", "trainer.steps", "1.5 (a number)", "a whole number", "steps=100"),
        ("sharding=fsdp", "sharding", "fsdp", "one of", "did you mean sharding=zero3?"),
        ("sharding=DDP", "sharding", "DDP", "one of", "did you mean sharding=replicated?"),
        ("precision=half", "precision", "half", "one of", "did you mean precision=fp16?"),
        ("model.activation=relu", "model.activation", "relu", "gelu_exact", "activation=gelu?"),
        ("telemetry.wandb=false", "telemetry.wandb", "False", "offline, on", "wandb=off; in"),
        ("lr=1", "lr", "1", "--help` lists", "did you mean optimizer.learning_rate?"),
        ("trainer.max_steps=1", "trainer.max_steps", "1", "--help` lists", "trainer.steps?"),
        ("launch.port=70000", "launch.port", "70000", "or equal to 65535", "launch.port=65535"),
        ("data.validation_percent=80", "data.validation_percent", "80", "less than 50", "=2"),
        ("optimizer.decayed=[bias]", "optimizer.decayed", "bias", "norms", "=[embedding]"),
        ("trainer.steps=", "trainer.steps", "'' (text)", "a whole number", "steps=100"),
        ("recompute=selectve", "recompute", "selectve", "none, selective, full", "=selective?"),
        ("parallel=2", "parallel", "2", "keys such as", "set parallel.tensor"),
        ("planner.tensor=[2,0]", "planner.tensor", "0", "whole numbers or null: gr", "=[1]"),
        ("planner.nodes=[0,1]", "planner.nodes", "0 (a", "list of whole numbers", "nodes=[1]"),
        ("planner.nodes=-1", "planner.nodes", "-1 (a", "list of whole numbers", "nodes=[1]"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate", "inf", "finite", "_rate=2"),
        ("launch.timeout_seconds=nan", "launch.timeout_seconds", "nan", "finite", ""),
    ],
)
def test_a_mistake_is_said_in_four_lines(override, key, got, wants, todo):
    error = _refusal(override)
    assert error.key == key
    assert got in str(error.got)
    assert wants in error.wants
    assert todo in error.todo
    assert error.exit_code == 2
    assert len(str(error).splitlines()) == 4


@pytest.mark.parametrize(
    ("overrides", "suggested"),
    [
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate=0.003"),
        (["optimizer=adamw", "optimizer.learning_rate=-1"], "optimizer.learning_rate="),
        (["data.global_batch=3x2"], "data.global_batch=16"),
        (["trainer.steps=7", "trainer.steps=x"], "trainer.steps=100"),
        (["data.tokenizer=5"], "data.tokenizer="),  # null, which the key has, says nothing
    ],
)
def test_the_value_that_a_key_would_have_is_suggested(overrides, suggested):
    with pytest.raises(ConfigError) as caught:
        configured(overrides)
    rest = [word for word in overrides if word.partition("=")[0] != caught.value.key]
    section, name = caught.value.key.split(".")
    assert caught.value.todo.startswith(f"set a value such as {suggested}")
    usual = compose(rest)[section][name]
    if usual is not None:
        assert caught.value.todo.endswith(f"={usual}")


PATHS = ["~/a b.txt", "/data/(old)/x.txt", '/a/say "hi".txt', "./a&b.txt", "données/a b.txt"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_hydra_cannot_read_needs_no_quotes(path):
    values = compose(["data=text", f"data.path={path}"])
    assert values["data"]["path"] == path
    assert decode(values).data.path == str(Path(path).expanduser()) if path[0] == "~" else path


def test_a_value_that_is_replaced_is_said(capsys):
    configured(["trainer.steps=5", "data=text", "data.path=a", "trainer.steps=6"])
    assert capsys.readouterr().err == "warning    trainer.steps=5 is replaced by trainer.steps=6\n"
    configured(["trainer.steps=6", "trainer.steps=6", "run.dir=of_the_script", "run.dir=mine"])
    assert capsys.readouterr().err == ""


def test_a_start_decodes_the_configuration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    validate = RunConfig.model_validate
    monkeypatch.setattr(
        RunConfig, "model_validate", lambda values: decoded.append(values) or validate(values)
    )
    keys = "launch.elastic=true", "sharding=zero3", "launch.ranks=2", "data.micro_batch=8"
    config, text = configure([*keys, f"run.dir={tmp_path}/run"])
    assert len(decoded) == 1
    assert decode(run_directory.from_yaml(text)) == config, "other ranks decode the text"
