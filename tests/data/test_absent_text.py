"""What is advised where a text is absent, or its corpus cannot be prepared again."""

from pathlib import Path

import pytest

from frontier_lab.trained_tokenizer import prepare_again
from frontier_llm.config.reading import check_files
from frontier_llm.config.run import RunConfig
from frontier_llm.data.prepare import prepare
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config, write_jsonl
from tests.data.test_run_loader import run_config


def with_path(settings: RunConfig, path: Path) -> RunConfig:
    return settings.changed("data", path=str(path))


@pytest.fixture
def absent(tmp_path: Path) -> tuple[RunConfig, Path]:
    """Return the configuration of a run whose text was deleted, and the corpus of the text."""
    text = write_jsonl(tmp_path / "text.jsonl")
    other = write_jsonl(tmp_path / "other.jsonl", 150)
    settings = config(tmp_path / "corpora", text)
    prepare(settings.model_copy(update={"path": str(other)}))
    folder = prepare(settings)
    (tmp_path / "corpora" / "no-corpus").mkdir()
    (tmp_path / "corpora" / "no-corpus" / "manifest.json").write_text("[1]")
    text.unlink()
    return run_config(settings), folder


def test_the_corpus_of_an_absent_text_is_named(absent: tuple[RunConfig, Path]):
    settings, folder = absent
    with pytest.raises(ConfigError) as caught:
        check_files(settings)
    assert caught.value.todo.count(f"write {folder} instead, which was prepared from it, ")
    with pytest.raises(DataError, match=f"start the run again with {folder}, which") as refused:
        prepare_again(settings, ", or evaluate other texts")
    assert "restore it or make it readable, or evaluate other texts" in str(refused.value)
    found = with_path(settings, folder)
    check_files(found)
    assert prepare_again(found) == (folder,)


def test_no_corpus_is_named_for_another_text(absent: tuple[RunConfig, Path]):
    settings = with_path(absent[0], absent[1].with_name("text"))
    with pytest.raises(ConfigError) as caught:
        check_files(settings)
    with pytest.raises(DataError) as refused:
        prepare_again(settings)
    assert "prepared from it" not in caught.value.todo + str(refused.value)


def test_a_command_without_keys_does_not_advise_to_set_one(tmp_path: Path):
    settings = config(tmp_path / "corpora", write_jsonl(tmp_path / "text.jsonl"))
    (tmp_path / "corpora").write_text("no folder can be made here")
    with pytest.raises(DataError, match=r"set data\.directory to another folder$"):
        prepare(settings)
    with pytest.raises(DataError, match="cannot write a corpus") as caught:
        prepare_again(run_config(settings), ", or evaluate other texts")
    advice = "or start the run again with another data.directory, or evaluate other texts"
    assert str(caught.value).endswith(advice)
