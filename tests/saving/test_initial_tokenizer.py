"""Initial weights go with the tokenizer that they were trained with, or the user asks otherwise."""

import re
import shutil
from pathlib import Path

import pytest

from frontier_lab.single_process_model import read_config
from frontier_lab.trained_tokenizer import find_tokenizer
from frontier_llm.checkpoint.discovery import find
from frontier_llm.data.tokenizer_source import digest_tokenizer
from frontier_llm.errors import ConfigError
from tests.forked_train import TINY, main, run, train
from tests.texts import prose

pytestmark = pytest.mark.slow
FIRST = {"one": 0, "other": 20}
"""The first document of each text."""


T5 = ("model=mt5_tiny", "model.vocabulary=500", "model.kv_heads=2", "data=text_spans")
OTHER_MODELS = [
    (
        T5,
        "model.layers",
        "4, of which 2 are the encoder's: both sides copy the 2",
        "set model.layers=4",
    ),
    ((*T5, "model.layers=4"), "model.head_dim", "16, as in the weights", "set model.head_dim=16 "),
    (["model.hidden=64"], "model.hidden", "32, as in the weights of run.init_from", "set model.h"),
    (["model.layers=3"], "model.layers", "2, as in the weights", "set model.layers=2, or leave"),
    # the same shapes, but other outputs
    (
        ["model.window=16"],
        "model.window",
        "null, as in the weights",
        "set model.window=null, or al",
    ),
    (
        ["model.layers=3", "model.norm_epsilon=1e-3"],
        "model.layers",
        "2, as in the weights",
        "set model.layers=2, and either model.norm_epsilon=1e-05 or ",
    ),
]
"""Overrides, the key that is named, what is wanted, and what to do."""


def of_text(folder: Path, name: str) -> tuple[str, ...]:
    """The overrides of a tiny run of one step on a text of this name."""
    path = folder / f"{name}.txt"
    path.write_text(prose(20, FIRST[name]))
    own = (f"data.path={path}", f"data.directory={folder}/prepared", "trainer.steps=1",
           "optimizer.decay_steps=2")  # fmt: skip
    return (*TINY, *own, f"run.dir={folder}/run-{name}", "launch.ranks=1", "parallel.pipeline=1")


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    assert train(*of_text(tmp_path, "one")).code == 0
    other = (*of_text(tmp_path, "other"), f"run.init_from={tmp_path}/run-one")
    ended = train(*other)
    assert ended.code == 2, ended.text
    said = ended.text[ended.text.index("configuration error at data.tokenizer") :].splitlines()
    assert [line[:10].strip() for line in said[1:4]] == ["got:", "wants:", "do:"]
    assert not (tmp_path / "run-other").exists()
    advised = re.search(r"set (data\.tokenizer=\S+) .*'(run\.allow_changes=\S+)'", said[3])
    assert advised is not None, said
    for number, advice in enumerate(advised.groups()):
        words = [w for w in other if number or not w.startswith("data.vocabulary=")]
        ended = train(*words, advice, f"run.dir={tmp_path}/{number}")
        assert ended.code == 0, ended.text
    # a run that has begun resumes, with its own weights
    ended = train(*other, advised[2], f"run.dir={tmp_path}/1", "trainer.steps=2")
    assert ended.code == 0, ended.text


def test_the_text_shows_the_tokenizer_that_a_checkpoint_does_not_record(tmp_path: Path) -> None:
    assert train(*of_text(tmp_path, "one")).code == 0
    checkpoint = find(tmp_path / "run-one")
    config, meta = read_config(tmp_path / "run-one"), dict(checkpoint.manifest.meta)
    wanted = meta.pop("tokenizer")
    assert digest_tokenizer(find_tokenizer(config, meta, checkpoint.folder)) == wanted
    Path(str(config.data.path)).write_text(prose(20, FIRST["other"]))
    with pytest.raises(ConfigError, match="restore the text of the run"):
        find_tokenizer(config, meta, checkpoint.folder)


@pytest.mark.exhaustive
def test_what_generate_says_to_do_without_a_tokenizer_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(*of_text(tmp_path, "one")).code == 0
    command = ["generate", f"{tmp_path}/run-one", "a", "--tokens=1"]
    (prepared,) = (tmp_path / "prepared").glob("[!.]*")
    kept = (prepared / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    ended = run(lambda: main(command))
    assert "tokenizer.* is damaged: it is absent or cannot be read\n  do: delete" in ended.text
    shutil.rmtree(prepared)
    ended = run(lambda: main(command))
    assert ended.code == 0, ended.text
    shutil.rmtree(prepared)
    (tmp_path / "one.txt").unlink()
    ended = run(lambda: main(command))
    assert ended.code == 2
    copying = re.search(
        r"do: restore it or make it readable, or copy its (\S+), or its .*, to (\S+)", ended.text
    )
    assert copying is not None, ended.text
    shutil.copy(kept, Path(copying[2]) / copying[1])
    ended = run(lambda: main(command))
    assert ended.code == 0, ended.text
    monkeypatch.chdir(tmp_path / "run-one" / "checkpoints")
    ended = run(lambda: main([*command, "--checkpoint", next(Path().glob("step_*")).name]))
    assert ended.code == 0, ended.text


@pytest.mark.exhaustive
def test_commands_without_keys_advise_no_key_without_a_text(tmp_path: Path) -> None:
    assert train(*of_text(tmp_path, "one")).code == 0
    shutil.rmtree(tmp_path / "prepared")
    text, folder = tmp_path / "one.txt", f"{tmp_path}/run-one"
    text.unlink()
    advice = {"evaluate": "add --text FILE", "generate": "write prompts", "inspect-data": ""}
    for problem in (f"there is no {text}\n", f"cannot read {text}, a link to {text}: "):
        for command, todo in advice.items():
            ended = run(lambda command=command: main([command, folder]))  # type: ignore[misc]
            assert ended.code == 2
            assert problem in ended.text
            assert "\n  do: restore it or make it readable" in ended.text
            assert todo in ended.text
            assert "set data.path" not in ended.text
        text.unlink(missing_ok=True)
        text.symlink_to(text)  # not even root can read it


def test_a_lost_configuration_is_written_again_as_advised(tmp_path: Path) -> None:
    assert train(*of_text(tmp_path, "one")).code == 0
    file = tmp_path / "run-one" / "config.yaml"
    for damage in (file.unlink, lambda: file.write_text("{")):
        damage()
        ended = run(lambda: main(["generate", str(file.parent), "a", "--tokens=1"]))
        assert ended.code == 2
        advised = re.search(r"do: +frontier-llm (inspect .*) > (\S+)", ended.text)
        assert advised is not None, ended.text
        Path(advised[2]).write_text(run(lambda words=advised[1]: main(words.split())).text)
        ended = run(lambda: main(["generate", str(file.parent), "a", "--tokens=1"]))
        assert ended.code == 0, ended.text
    file.write_text("{")
    shutil.rmtree(file.parent / "checkpoints")
    ended = run(lambda: main(["generate", str(file.parent), "a", "--tokens=1"]))
    assert "do: copy it from another folder of the same run" in ended.text


def test_weights_go_with_the_same_text_and_model(tmp_path: Path) -> None:
    same = of_text(tmp_path, "one")
    assert train(*same).code == 0
    for words, key, wants, todo in OTHER_MODELS:
        # the text differs, too, but the error is about the model
        other = of_text(tmp_path, "other")
        ended = train(*other, f"run.init_from={tmp_path}/run-one", *words)
        assert ended.code == 2, ended.text
        assert f"configuration error at {key}\n" in ended.text
        assert "corpus  " not in ended.text, "nothing was prepared"
        assert re.search(rf"wants:  {wants}.*\n  do:     {todo}", ended.text), ended.text
    allowed = ("model.window=16", "run.allow_changes=[model.window]", "model.dropout=0.1")
    for number, words in enumerate(((), allowed)):
        next_run = (f"run.init_from={tmp_path}/run-one", f"run.dir={tmp_path}/{number}")
        ended = train(*same, *next_run, *words)
        assert ended.code == 0, ended.text
