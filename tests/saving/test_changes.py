"""Changes of a resumed run: what can never be loaded, and what `run.allow_changes` has to name."""

import copy
import functools
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontier_lab.commands import evaluate, generate
from frontier_llm.cli.options import run_command
from frontier_llm.config import RunConfig, decode
from frontier_llm.config.decode import defaults
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.saving.changes import SHOWN, changes, check_corpus, refuse
from tests.forked_train import TINY, train
from tests.texts import prose
from tests.values import tiny_values

LENGTH = "data.sequence_length"
MODEL_KEYS = {
    "layers": 6, "hidden": 128, "heads": 8, "kv_heads": 2, "head_dim": 16, "ffn": 96,
    "vocabulary": 999, "positions": "rotary", "norm": "rmsnorm", "norm_placement": "output",
    "qk_norm": "head", "bias": False, "tied": False, "activation": "swiglu", "dropout": 0.5,
    "window": 5, "init_std": 0.5, "scaled_attention": False, "residual": "parallel",
}  # fmt: skip


def refusal(now: dict[str, Any], *allowed: str) -> ConfigError | None:
    """Resume the tiny run with other values; return why it is refused."""
    now = {**now, "run": {**now["run"], "allow_changes": list(allowed)}}
    config = decode(now)
    found = changes(decode(tiny_values()).model_dump(mode="json"), config.model_dump(mode="json"))
    try:
        refuse(found, config)
    except ConfigError as error:
        return error
    return None


def test_the_first_ten_changes_are_named_and_the_others_counted() -> None:
    values = tiny_values()
    betas = {"beta1": 0.8, "beta2": 0.9}
    error = refusal({**values, "optimizer": {**values["optimizer"], **betas}})
    assert error is not None
    assert (error.key, error.got) == ("optimizer.beta1", "0.8; optimizer.beta2=0.9, not 0.95")
    factors = dict.fromkeys(values["optimizer"]["rate_factors"], 0.5)
    many = {"epsilon": 1e-3, "weight_decay": 0.3, "clip_norm": 9.0, "learning_rate": 1e-5, **betas}
    many |= {"warmup_steps": 7, "schedule": "constant", "rate_factors": factors}
    error = refusal({**values, "optimizer": {**values["optimizer"], **many}})
    assert error is not None
    assert str(error.got).count(", not ") == SHOWN - 1
    more = error.todo.split("[")[1].count(",") + 1 - SHOWN
    assert str(error.got).endswith(f"; and {more} more")


def shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    return model_shapes(config.model, config.data.sequence_length)


@pytest.mark.parametrize("name", MODEL_KEYS)
def test_a_key_is_offered_only_if_the_checkpoint_can_be_loaded(name: str) -> None:
    values = tiny_values()
    now = {**values, "model": {**values["model"], name: MODEL_KEYS[name]}}
    is_of_heads = name in ("heads", "kv_heads", "head_dim")  # which order the rows
    fits = shapes(decode(now)) == shapes(decode(values)) and not is_of_heads
    first = refusal(now)
    assert first is not None
    assert first.key == f"model.{name}"
    assert ("run.allow_changes" in first.todo) == fits
    assert (refusal(now, "model") is None) == fits
    if not fits:
        old = decode(values).model_dump(mode="json")["model"][name]
        old = old if isinstance(old, str) else json.dumps(old)
        assert f"set model.{name}={old}" in first.todo


def test_a_key_that_an_older_version_lacks_has_its_default() -> None:
    """As it would be decoded, and as a checkpoint stores it."""
    now = decode(tiny_values()).model_dump(mode="json")
    for key, default in defaults().items():
        before = copy.deepcopy(now)
        *sections, name = key.split(".")
        inner = functools.reduce(dict.__getitem__, sections, before)
        value = inner.pop(name)
        found = changes(before, now)
        assert json.loads(json.dumps(found)) == (
            {} if value == default else {key: [default, value]}
        )
        older = decode(before).model_dump(mode="json")
        assert functools.reduce(dict.__getitem__, key.split("."), older) == default


def test_the_length_of_learned_positions_is_never_offered() -> None:
    longer = tiny_values(f"{LENGTH}=64", "optimizer.learning_rate=1e-4")
    before = tiny_values()["data"]["sequence_length"]
    for allowed in ([], [LENGTH], ["data", "optimizer"]):
        error = refusal(longer, *allowed)
        assert error is not None
        rate = "" if "optimizer" in allowed else "; optimizer.learning_rate=0.0001, not 0.003"
        assert (error.key, error.got) == (LENGTH, f"64 with model.positions=learned{rate}")
        assert "embedding.positions.weight" in error.wants
        assert f"set {LENGTH}={before}, " in error.todo
        assert "run.dir=NEW_RUN model.positions=rotary" in error.todo
        assert ("allow_changes" in error.todo) == bool(rate)
        if not allowed:
            assert "run.allow_changes=[optimizer.learning_rate]" in error.todo


def test_the_path_of_the_text_is_part_of_what_is_undone() -> None:
    text = "data=text", "data.path=/x/book.txt", "data.text_key=body"
    saved = decode(tiny_values(*text)).model_dump(mode="json")
    now = decode(tiny_values("data=stdlib", "model.layers=6"))
    with pytest.raises(ConfigError) as caught:
        refuse(changes(saved, now.model_dump(mode="json")), now)
    undone = shlex.split(caught.value.todo.split(", and either ")[1].split(" or 'run.allow")[0])
    assert {"data=text", "data.path=/x/book.txt"} <= {*undone}
    assert not any(word.startswith(("data.kind", "data.name")) for word in undone)
    back = decode(tiny_values(*undone, "model.layers=4", "data.text_key=body"))
    assert not changes(saved, back.model_dump(mode="json"))


def test_one_refusal_names_all_that_one_command_has_to_undo() -> None:
    """Also a key without effect now that has one again when the others are set back."""
    before = tiny_values("data.vocabulary=300")
    now = tiny_values("data.tokenizer=/x", "model.layers=6", "data.unique=true", "optimizer=muon")
    saved, config = (decode(values).model_dump(mode="json") for values in (before, now))
    with pytest.raises(ConfigError) as caught:
        refuse(changes(saved, config), decode(now))
    error, layers = caught.value, before["model"]["layers"]
    assert (error.key, error.wants.split(",")[0]) == ("model.layers", str(layers))
    fixed, rest = error.todo.split(", and either ")
    assert fixed == f"set model.layers={layers}"
    settings, rest = rest.split(" or 'run.allow_changes=[")
    allowed, otherwise = rest.split("]'; or ")
    assert otherwise.endswith("run.dir=NEW_RUN")
    undone = [*shlex.split(settings), f"model.layers={layers}"]
    assert {"data.tokenizer=null", "data.vocabulary=300", "data.unique=false"} <= {*undone}
    assert "data.vocabulary" not in allowed, "it has no effect if the tokenizer is allowed"
    again = decode(tiny_values("data.tokenizer=/x", "data.unique=true", "optimizer=muon", *undone))
    refuse(changes(saved, again.model_dump(mode="json")), again)
    keys = ("model.layers", *allowed.split(","))
    kept = [f"run.allow_changes=[{','.join(keys[1:])}]", f"model.layers={layers}"]
    again = decode(tiny_values("data.tokenizer=/x", "data.unique=true", "optimizer=muon", *kept))
    refuse(changes(saved, again.model_dump(mode="json")), again)


def test_all_keys_that_change_shapes_are_named_and_no_other() -> None:
    now = tiny_values("model.layers=6", "model.hidden=128", "model.dropout=0.5", "trainer.seed=7")
    error = refusal(now, "model")
    assert error is not None
    assert "model.layers=" in error.todo
    assert "model.hidden=" in error.todo
    assert "model.dropout" not in error.todo


OPTIMIZERS = {
    "adamw": ("optimizer.name=adamw",),
    "adamw_8bit": ("optimizer.name=adamw_8bit",),
    "muon": ("optimizer.name=muon",),
    "adafactor": ("optimizer.name=adafactor", "optimizer.beta1=0.0"),
    "adafactor with momentum": ("optimizer.name=adafactor", "optimizer.beta1=0.5"),
}
LOADABLE = {
    ("adamw", "adamw_8bit"), ("adamw_8bit", "adamw"), ("adamw", "muon"), ("adamw_8bit", "muon"),
    ("adafactor with momentum", "adafactor"),
}  # fmt: skip
"""Changes after which the checkpoint holds all states, as resumed runs have shown."""


@pytest.mark.parametrize("after", OPTIMIZERS)
@pytest.mark.parametrize("before", OPTIMIZERS)
def test_an_optimizer_without_its_states_is_never_offered(before: str, after: str) -> None:
    config = decode(tiny_values(*OPTIMIZERS[after], "run.allow_changes=[optimizer]"))
    saved = decode(tiny_values(*OPTIMIZERS[before])).model_dump(mode="json")
    found = changes(saved, config.model_dump(mode="json"))
    if before == after or (before, after) in LOADABLE:
        refuse(found, config)
        return
    with pytest.raises(ConfigError, match=r"run\.init_from=RUN run\.dir=NEW_RUN") as caught:
        refuse(found, config)
    assert caught.value.key in ("optimizer.name", "optimizer.beta1")


def test_other_heads_are_refused_although_they_are_allowed() -> None:
    error = refusal(tiny_values("model.heads=1", "run.allow_changes=[model]"), "model")
    assert error is not None
    assert "are ordered by heads" in error.wants
    assert "run.dir=NEW_RUN" in error.todo
    side = ("model=t5gemma_tiny", "data=stdlib_spans", "model.encoder_hidden=64")
    heads = [[f"model.encoder_heads={n}", f"model.encoder_kv_heads={n}",
              f"model.encoder_head_dim={64 // n}"] for n in (2, 4)]  # fmt: skip
    before, now = (decode(tiny_values(*side, *own, "run.allow_changes=[model]")) for own in heads)
    found = changes(before.model_dump(mode="json"), now.model_dump(mode="json"))
    with pytest.raises(ConfigError, match="are ordered by heads"):
        refuse(found, now)


def test_the_list_grows_by_what_is_refused_and_by_another_path() -> None:
    now = tiny_values("optimizer.learning_rate=1e-4", "trainer.seed=7", "data.path=other.txt")
    error = refusal(now, "optimizer")
    assert error is not None
    assert "run.allow_changes=[optimizer,trainer.seed,data.path]" in error.todo
    # keys without effect need not be named, neither before the start nor by the ranks
    assert refusal(tiny_values("model.rotary_base=77")) is None


def corpus_refusal(
    *overrides: str, stored: str | None = "t1", own: str = "t1", marked_files: int = 0
) -> str | None:
    """Resume with another corpus; return the refusal or the warning."""
    config = decode(tiny_values(*overrides))
    saved = decode(tiny_values()).model_dump(mode="json")
    account = SimpleNamespace(marked_files=marked_files)
    corpus: Any = SimpleNamespace(digest="new", tokenizer_sha256=own, account=account)
    meta = {"corpus": "old"} | ({} if stored is None else {"tokenizer": stored})
    try:
        found = changes(saved, config.model_dump(mode="json"))
        return check_corpus(found, config, corpus, meta, Path("runs/a/checkpoints/step_00000001"))
    except ConfigError as error:
        return str(error)


def test_a_corpus_is_refused_by_the_name_of_what_differs() -> None:
    text = corpus_refusal("run.allow_changes=[trainer.seed]")
    assert text is not None
    assert "error at data.path" in text
    assert "tokenizer t" not in text
    assert "run.allow_changes=[trainer.seed,data.path]" in text
    given = ("data.tokenizer=some.model", "data.end_of_document=x")
    text = corpus_refusal(*given, stored="t1", own="t2")
    assert text is not None
    assert "error at data.tokenizer" in text
    assert "tokenizer t1" in text
    assert "run.allow_changes=[data.path,data.tokenizer]" in text
    # text alone does not explain other tokens, which spoil the model
    for path in ("data.path", "data.corpora"):
        text = corpus_refusal(f"run.allow_changes=[{path}]", own="t2")
        assert "data.tokenizer=PATH, the tokenizer until now" in (text or "")
    divided = corpus_refusal(marked_files=1)
    assert "run.allow_changes=[data.format]' data.format=text" in (divided or "")
    text = corpus_refusal("run.allow_changes=[data.tokenizer]", own="t2")
    assert "changed their meaning" in (text or "")


def test_an_allowed_change_of_the_preparation_explains_another_corpus() -> None:
    assert corpus_refusal("data.unique=true", "run.allow_changes=[data.unique]") is None
    smaller = ("data.vocabulary=99", "run.allow_changes=[data.vocabulary]")
    assert "changed their meaning" in (corpus_refusal(*smaller, own="t2") or "")
    # other records give another tokenizer, which no other key than the tokenizer's allows
    records = ("data.text_key=body", "run.allow_changes=[data.text_key]")
    assert "data.tokenizer=PATH, the tokenizer until now" in (
        corpus_refusal(*records, own="t2") or ""
    )
    assert corpus_refusal(*records) is None
    # nor do they explain another file
    other = corpus_refusal("data.path=other.jsonl", *records)
    assert "run.allow_changes=[data.text_key,data.path]" in (other or "")
    # a list of keys that do not change the corpus explains nothing
    assert "error at data.path" in (corpus_refusal("run.allow_changes=[data.unique]") or "")
    assert corpus_refusal("run.allow_changes=[data.path]", stored=None) is None


@pytest.mark.slow
def test_what_a_refusal_advises_works(tmp_path: Path) -> None:
    for name, first in (("text", 0), ("other", 20)):
        (tmp_path / f"{name}.txt").write_text(prose(20, first))
    run = (
        *TINY, f"data.directory={tmp_path}/prepared", "optimizer.decay_steps=4",
        f"run.dir={tmp_path}/run", "model.positions=learned",
    )  # fmt: skip
    assert train(*run, f"data.path={tmp_path}/text.txt", "trainer.steps=1").code == 0
    shutil.copytree(tmp_path / "run", tmp_path / "saved")
    on = (*run, "trainer.steps=2")
    ended = train(
        *on, f"data.path={tmp_path}/text.txt", f"{LENGTH}=16", f"run.allow_changes=[{LENGTH}]"
    )
    assert ended.code == 2, ended.text
    assert "16 with model.positions=learned" in ended.text
    assert "start      2 ranks" not in ended.text, "refused before the corpora are prepared"
    changed = (*on, f"data.path={tmp_path}/other.txt", "data.vocabulary=290")
    before = contents(tmp_path / "run")
    ended = train(*changed)
    assert ended.code == 2, ended.text
    assert contents(tmp_path / "run") == before, "a refused start changes nothing"
    (allowing,) = re.findall(r"'(run\.allow_changes=\S+)'", ended.text)
    ended = train(*changed, allowing)
    assert ended.code == 0, ended.text
    assert "ids of tokens have changed their meaning" in ended.text


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_changed_text_changes_no_token_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer that was trained on the text is kept in the folder of its prepared corpus."""
    path, run = tmp_path / "text.txt", tmp_path / "run"
    path.write_text(prose(20))
    ended = train(
        *TINY, f"data.directory={tmp_path}/prepared", f"data.path={path}", f"run.dir={run}",
        "trainer.steps=1", "optimizer.decay_steps=4",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    (tmp_path / "other.txt").write_text(prose(20, 20))

    def said(command: Callable[[list[str]], int], *words: str) -> str:
        code = run_command(lambda: command([str(run), *words]))
        out, err = capsys.readouterr()
        shown = (out if code == 0 else err).splitlines()
        return f"{code} " + "\n".join(li for li in shown if not re.match(r"\d\d:\d\d:", li))

    asked = ((generate.main, "a", "--tokens=8"), (evaluate.main, "--text", f"{tmp_path}/other.txt"))
    before = [said(*words) for words in asked]
    assert all(answer.startswith("0 ") for answer in before)
    path.write_text(prose(40))
    assert [said(*words) for words in asked] == before
    refusal = said(evaluate.main)
    assert refusal.startswith("2 ")
    assert "whose tokenizer is not that of step 1" in refusal
    path.unlink()
    assert [said(*words) for words in asked] == before
