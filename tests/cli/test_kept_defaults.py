"""Values of another model or machine that a command line keeps are named."""

from pathlib import Path

import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.cli.kept_defaults import warn_of_kept_defaults
from frontier_llm.cli.package_files import CONF_DIR_VARIABLE
from frontier_llm.config import decode


def warnings(*overrides: str) -> list[str]:
    found: list[str] = []
    warn_of_kept_defaults(decode(compose(overrides)), overrides, found.append)
    return found


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["model=llama_7b", "model.hidden=2048"], "model.ffn=11008"),
        (["model=llama_7b", "model.hidden=2048", "model.ffn=5504"], None),
        (["model=llama_7b", "model.hidden=4096"], None),
        (["model=llama_7b", "model.layers=8"], None),
        (["model=llama3_8b", "model.heads=16"], "model.kv_heads=8"),
        (["model=llama_7b"], None),
        (["model.hidden=128"], None),
        (["experiment=llama3_8b_32k", "model.heads=16"], "model.kv_heads=8"),
        (["model=t5gemma_9b_2b", "model.encoder_hidden=2048"], "model.encoder_ffn=14336"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_dimensions_of_another_size_of_the_model_are_named(overrides, kept):
    found = warnings(*overrides)
    assert len(found) == (kept is not None)
    if kept:
        assert found[0].startswith(kept)
        file = overrides[0].partition("=")[2].removesuffix("_32k")
        assert f"kept from {file}, which has" in found[0]
        cured = [*overrides, *(f"{word.partition('=')[0]}=null" for word in _named(found[0]))]
        assert warnings(*cured) == []


@pytest.mark.parametrize(
    ("ffn", "kept"), [(5504, "5504"), ("${data.vocabulary}", "300")], ids=["number", "reference"]
)
def test_a_file_that_builds_on_another_is_the_one_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ffn: int | str, kept: str
) -> None:
    (tmp_path / "model").mkdir()
    content = f"defaults: [llama_7b, _self_]\nhidden: 2048\nffn: {ffn}\n"
    (tmp_path / "model" / "mine.yaml").write_text(content)
    monkeypatch.setenv(CONF_DIR_VARIABLE, str(tmp_path))
    words = ("model=mine", "data.vocabulary=300")
    assert warnings(*words, "model.hidden=2048") == []
    (found,) = warnings(*words, "model.hidden=1024")
    assert found.startswith(f"model.ffn={kept}: kept from llama_7b, which has hidden=2048")


def _named(warning: str) -> list[str]:
    return warning.partition(": kept")[0].split(", ")
