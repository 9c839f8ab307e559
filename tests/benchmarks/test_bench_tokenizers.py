"""The comparison of tokenizers finds documents with other tokens than the library's."""

from pathlib import Path

import pytest

from benchmarks.bench_preprocess import Outcome
from benchmarks.bench_tokenizers import Comparison, Row, compare, documents, make_tokenizers
from benchmarks.peers.preprocess_peers import prepare_input
from tests.data.conftest import write_jsonl

pytest.importorskip("tokenizers")

# the libraries start threads that they keep
pytestmark = pytest.mark.forked


def test_tokens_are_compared_with_the_library(tmp_path: Path):
    write_jsonl(tmp_path / "input.jsonl", 120)
    folders = make_tokenizers(tmp_path, 300)
    assert list(folders) == ["sentencepiece", "gpt2", "llama3", "qwen2"]
    corpora = {name: prepare_input(folder, 1) for name, folder in folders.items()}
    assert len(list(documents(corpora["gpt2"], tmp_path / "input.jsonl"))) == 120
    for name, folder in folders.items():
        found = compare(corpora[name], folder, 1)
        assert (found.documents, found.differ) == (120, 0)
        assert found.text_bytes > 120 * 40
        assert Row(Outcome(name), found).equal
    other = compare(corpora["llama3"], folders["gpt2"], 1)
    assert other.differ > 60
    assert not Row(Outcome("gpt2"), other).equal


@pytest.mark.parametrize("found", [None, Comparison()])
def test_nothing_compared_is_not_equal(found: Comparison | None):
    assert not Row(Outcome("gpt2", error="killed"), found).equal
