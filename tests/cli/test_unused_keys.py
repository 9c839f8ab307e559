"""A key that a user sets without effect is refused, and what is advised gives it an effect."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from frontier_lab.sweeps.sweep import first_configuration
from frontier_llm.cli.compose import compose, configured, groups
from frontier_llm.cli.options import TRIAL_VARIABLE
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.cli.train import configure
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.data import CORPUS_FILES
from frontier_llm.config.needed import NEEDS, SWEEP, Need, unused
from frontier_llm.errors import ConfigError
from tests.config.test_every_key import others
from tests.covering import one_in

# settings that take the need away, where it is met by default
WITHOUT = {
    "data.tokenizer=null": ["data.tokenizer=/x"],
    "data.path=TEXT": ["data=text", "data.path=CORPUS"],
    "data.prefetch=1": ["data.prefetch=0"],
    "kernels=auto": ["kernels=compiled"],
    "cluster=cpu_laptop": ["cluster=a100_80g"],
    "optimizer.schedule=cosine": ["optimizer.schedule=constant"],
    "optimizer=adamw": ["optimizer=adafactor"],
    "optimizer.weight_decay=0.1": ["optimizer.weight_decay=0"],
    "trainer.sample_tokens=48": ["trainer.sample_tokens=0"],
    "launch.trial_runner=train": ["launch.trial_runner=plan"],
    "recovery.enabled=false": ["recovery.enabled=true"],
    "watchdog.enabled=true": ["watchdog.enabled=false"],
    "watchdog.stragglers_every_steps=200": ["watchdog.stragglers_every_steps=null"],
    "checkpoint=lazy": ["checkpoint=off"],
    "recovery.partner_copies=false": ["recovery.partner_copies=true"],
    "telemetry.wandb=offline": ["telemetry.wandb='off'"],
    "parallel.pipeline=2": ["parallel.pipeline=1"],
    "model.scaled_attention=true": ["model=mt5_tiny", "data=stdlib_spans"],
}
WORDS = {
    "TEXT": "/x", "DIRECTORY": "/tmp", "TOKENS": "8", "FILE": "/x", "COMMAND": "cp",
    "=offline": "='offline'",
    "cluster=NAME of a machine with GPUs": "cluster=a100_80g",
}  # fmt: skip


@cache
def _defaults() -> dict[str, Any]:
    return compose([])


@cache
def _decoded(*overrides: str) -> RunConfig:
    return decode(compose(list(overrides)))


def _setting(need: Need) -> tuple[str, str]:
    """Return an override with another value than the default, and its key."""
    key = need.full_keys[-1]
    values = _defaults()
    for part in key.split("."):
        values = values[part]
    text = json.dumps(next(v for v in others(key, values) if v is not None))
    return f"{key}=" + re.sub(r'"(\w+)":', r"\1:", text), key  # hydra takes no quoted keys


def _without(need: Need) -> list[str]:
    return [] if need.setting == "optimizer.schedule=wsd" else WITHOUT.get(need.setting, [])


TRACED = "trainer.steps={telemetry.trace_from_step}"
"""What a trace that begins after the last step needs; the first step is always one of the run."""
SETTINGS = [need for need in NEEDS if need.setting not in (SWEEP, TRACED)]


@pytest.mark.parametrize("need", SETTINGS, ids=lambda need: f"{need.full_keys[-1]}-{need.setting}")
def test_it_is_refused_and_what_is_advised_gives_it_an_effect(need: Need, tmp_path: Path) -> None:
    override, key = _setting(need)
    for name in CORPUS_FILES:
        (tmp_path / name).touch()
    base = [word.replace("CORPUS", str(tmp_path)) for word in _without(need)]
    assert not need.is_met(_decoded(*base))
    with pytest.raises(ConfigError) as caught:
        configured([*base, override])
    assert caught.value.key == key
    keys = [word.partition("=")[0] for word in need.setting.split()]
    others = [word for word in base if word.partition("=")[0] in keys]
    assert caught.value.todo.startswith(f"leave {key} out, or write ")
    assert caught.value.todo.partition(" instead of ")[2] == " ".join(others)
    advised = need.setting
    for word, value in WORDS.items():
        advised = advised.replace(word, value)
    assert need.is_met(_decoded(*base, *advised.split()))


@pytest.mark.parametrize("experiment", one_in(4, groups()["experiment"]))
def test_no_experiment_sets_a_key_without_effect(experiment: str) -> None:
    configured([f"experiment={experiment}"])


def test_the_default_may_be_set_and_a_preset_may_be_turned_off() -> None:
    configured(["recovery.spares=0", "precision.initial_loss_scale=65536.0"])
    configured(["optimizer=muon", "optimizer.name=adamw"])
    configured(["experiment=datastates_7b", "checkpoint=off"])


def test_an_experiment_of_the_user_is_refused_like_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    content = "# @package _global_\n{}data: {{path: book.txt}}\n"
    file.write_text(content.format(""))
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="choose data=text in experiment mine") as caught:
        configured(["experiment=mine"])
    assert caught.value.key == "data.path"
    file.write_text(content.format("defaults: [{override /data: text}]\n"))
    configured(["experiment=mine"])
    # sweeps may use it, too
    file.write_text("# @package _global_\nlaunch: {trial_minutes: 3, trial_value: loss}\n")
    configured(["experiment=mine"])


def test_trials_and_axes_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = ["precision=bf16,fp16", "precision.initial_loss_scale=1024"]
    assert first_configuration(axes).precision.name == "bf16"
    with pytest.raises(ConfigError):
        first_configuration(["trainer.seed=1,2", axes[1]])
    with pytest.raises(ConfigError):
        configured([axes[1]])
    monkeypatch.setenv(TRIAL_VARIABLE, "1")
    configured([axes[1]])


def test_a_trace_after_the_last_step_is_refused() -> None:
    words = ["telemetry.trace_from_step=1500", "trainer.steps=8"]
    with pytest.raises(ConfigError, match=r"with trainer\.steps=1500: the run ends") as caught:
        configured(words)
    assert caught.value.key == "telemetry.trace_from_step"
    assert "or write trainer.steps=1500 instead of trainer.steps=8" in caught.value.todo
    configured([words[0], "trainer.steps=1500"])


@pytest.mark.parametrize(
    ("data", "advised"),
    [("stdlib_spans", "text_spans"), ("stdlib", "text"), ("blend", "text")],
)
def test_another_corpus_is_advised_with_the_same_objective(data: str, advised: str) -> None:
    words = [f"data={data}", "data.path=book.txt"]
    words += ["data.corpora=[{name: a, path: a.txt, weight: 1}]"] if data == "blend" else []
    words += ["model=mt5_tiny"] if data == "stdlib_spans" else []
    with pytest.raises(ConfigError, match=r"at data\.path") as caught:
        configured(words)
    assert caught.value.todo.endswith(f"or write data={advised} instead of data={data}")


@pytest.mark.parametrize("word", ["minutes=1", "value=loss", "runner=plan", "micro_batches=2"])
def test_a_key_of_trials_is_refused_outside_of_a_sweep(word: str) -> None:
    key = f"launch.trial_{word.partition('=')[0]}"
    with pytest.raises(ConfigError, match="to be used with frontier-llm sweep") as caught:
        configured([f"launch.trial_{word}"])
    assert (caught.value.key, caught.value.todo[:20]) == (key, f"leave {key}"[:20])
    assert first_configuration([f"launch.trial_{word}", "trainer.seed=1,2"])


def test_an_older_run_resumes_without_its_idle_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint has the value that the key had when it was accepted."""
    from frontier_llm.cli import run_preparation

    saved = decode(compose(["data.text_key=body"])).model_dump(mode="json")
    monkeypatch.setattr(run_preparation.tiers, "newest_folder", lambda _: tmp_path)
    monkeypatch.setattr(run_preparation.tiers, "saved_meta", lambda _: {"config": saved})
    overrides = [f"run.dir={tmp_path}/run", "plan=off", "launch.ranks=4"]
    assert "text_key: text" in configure(overrides)[1]
    with pytest.raises(ConfigError, match=r"data\.unique"):
        configure([f"run.dir={tmp_path}/other", *overrides[1:], "data.unique=true"])
    idle = dict(unused(decode(compose([]))))
    assert "data.text_key" in idle
    assert "data.unique" not in idle


def test_null_turns_off_what_a_preset_sets():
    words = ["optimizer=adafactor", "optimizer.schedule=cosine", "optimizer.timescale_steps=null"]
    assert configured(words).config.optimizer.timescale_steps is None
