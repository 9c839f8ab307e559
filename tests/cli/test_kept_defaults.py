"""Values of another model or machine that a command line keeps are named."""

import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.cli.kept_defaults import warn_of_kept_defaults
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


def _named(warning: str) -> list[str]:
    return warning.partition(": kept")[0].split(", ")
