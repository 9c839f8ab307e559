"""Loaders of a run: blends, spans, rejected configurations, and the origins of samples."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_lab.commands.origins import find_origins
from frontier_llm.config.data import DataConfig
from frontier_llm.config.denoisers import sample_parts
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import Corpora, open_all, open_data, prepare_all
from frontier_llm.data.prepare import find_prepared, prepare
from frontier_llm.data.run_loader import make_loader, make_windows, prepare_for_model
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config, documents, write_jsonl
from tests.data.text_stream import restore
from tests.values import tiny_values


def run_config(data: DataConfig, *overrides: str) -> RunConfig:
    values = tiny_values("model.vocabulary=600", *overrides)
    values["data"] = data.model_dump()
    return RunConfig.model_validate(values)


def blend(tmp_path: Path, **changes: Any) -> DataConfig:
    corpora = []
    for number, name in ((80, "small"), (400, "large")):
        path = write_jsonl(tmp_path / f"{name}.jsonl", number)
        corpora.append({"name": name, "path": str(path)})
    return config(tmp_path / "c", None, kind="blend", name="both", corpora=corpora, **changes)


@pytest.fixture
def one(folder: Path, tmp_path: Path) -> tuple[DataConfig, Corpora]:
    data = config(tmp_path, tmp_path / "nowhere")
    return data, open_all(data, [folder])


def test_a_blend_has_one_tokenizer_and_reads_each_corpus_completely(tmp_path: Path):
    data = blend(tmp_path)
    corpora = open_data(data)
    small, large = corpora.corpora
    assert small.manifest.tokenizer_sha256 == large.manifest.tokenizer_sha256
    assert corpora.manifest.train.tokens == len(small.train) + len(large.train)
    assert corpora.weights["small"] == pytest.approx(
        len(small.train) ** 0.3 / (len(small.train) ** 0.3 + len(large.train) ** 0.3)
    )
    windows = make_windows(run_config(data), corpora, train=True)
    rows = [windows[index] for index in range(200)]
    share = sum(_is_from(row, small) for row in rows) / 200
    assert share == pytest.approx(corpora.weights["small"], abs=0.03)
    assert prepare_all(data) == prepare_all(data)


def _is_from(row: np.ndarray, corpus: Any) -> bool:
    whole = corpus.train.read(0, len(corpus.train)).astype(np.int64).tobytes()
    return row.tobytes() in whole


def test_a_blend_does_not_depend_on_the_layout(tmp_path: Path):
    data = blend(tmp_path)
    settings, corpora = run_config(data), open_data(data)
    windows = make_windows(settings, corpora, train=True)
    wanted = np.stack([windows[8 + index][:-1] for index in range(8)])
    seen = []
    for rank in range(2):
        with closing(make_loader(settings, corpora, rank, 2, train=True)) as loader:
            seen.append(loader.micro_batches(8))
    dealt = [batch.tokens for pair in zip(*seen, strict=True) for batch in pair]
    assert np.array_equal(torch.cat(dealt).numpy(), wanted)


def test_corpora_of_different_tokenizers_are_refused(tmp_path: Path, folder: Path):
    data = blend(tmp_path)
    other = prepare(config(tmp_path / "x", write_jsonl(tmp_path / "x.jsonl", 70), vocabulary=290))
    with pytest.raises(DataError, match=r"was prepared with another tokenizer than.*\n  do: "):
        open_all(data, [folder, other])


def test_a_prepared_corpus_gives_a_blend_its_tokenizer(tmp_path: Path, folder: Path):
    text = write_jsonl(tmp_path / "text.jsonl", 60)
    entries = [{"name": "given", "path": str(folder)}, {"name": "text", "path": str(text)}]
    data = config(tmp_path / "c", None, kind="blend", corpora=entries)
    assert [found for _, found in find_prepared(data)] == [folder, None]
    folders = prepare_all(data)
    assert [found for _, found in find_prepared(data)] == [folder, folders[1]] == list(folders)
    assert len({c.manifest.tokenizer_sha256 for c in open_all(data, folders).corpora}) == 1
    other = prepare(config(tmp_path / "x", text, vocabulary=290))
    with pytest.raises(ConfigError, match=r"data\.tokenizer\n.*\n.* the prepared corpus "):
        prepare_all(data.model_copy(update={"tokenizer": str(other)}))


def test_batches_of_spans_restore_the_text(one: tuple[DataConfig, Corpora]):
    data, corpora = one
    data = data.model_copy(update={"objective": "spans", "sequence_length": 48})
    settings = run_config(data)
    with closing(make_loader(settings, corpora, 0, 1, train=True)) as loader:
        batch = loader.micro_batches(16)[1]
        again = loader.micro_batches(16)[1]
    assert batch.encoder_tokens is not None
    assert torch.equal(batch.encoder_tokens, again.encoder_tokens)
    window = make_windows(settings, corpora, train=True)[18]
    assert len(window) == sample_parts(48).text
    text = restore(
        batch.encoder_tokens[0].tolist(),
        batch.labels[0][batch.loss_mask[0] > 0].tolist(),
        corpora.tokenizer.sentinels(sample_parts(48).spans),
        corpora.tokenizer.eod,
    )
    assert text == window.tolist()
    last = corpora.tokenizer.vocabulary + 99
    assert corpora.tokenizer.sentinels(3) == [last, last - 1, last - 2]


def test_causal_is_the_default(one: tuple[DataConfig, Corpora]):
    data, corpora = one
    with closing(make_loader(run_config(data), corpora, 0, 1, train=False)) as loader:
        assert loader.micro_batches(0)[0].encoder_tokens is None


def test_a_corpus_smaller_than_a_batch_is_refused(one: tuple[DataConfig, Corpora]):
    data, corpora = one
    data = data.model_copy(update={"global_batch": 4096})
    with pytest.raises(DataError, match=r"has \d+ samples of data\.sequence_length=16: a step"):
        make_loader(run_config(data), corpora, 0, 1, train=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 4096}, "a step of"),
        ({"sequence_length": 2048, "global_batch": 1, "micro_batch": 1}, "validation.bin has"),
    ],
)
def test_too_little_text_is_refused_before_the_ranks_start(
    tmp_path: Path, changes: dict[str, int], message: str
):
    data = config(tmp_path / "c", write_jsonl(tmp_path / "text.jsonl"), **changes)
    with pytest.raises(DataError, match=rf"{message}.*\n  do: add text"):
        prepare_for_model(run_config(data))


@pytest.mark.parametrize("ranks", [1, 7, 512])
def test_the_largest_batch_that_a_corpus_fills_is_advised(tmp_path: Path, ranks: int):
    text = write_jsonl(tmp_path / "text.jsonl")
    data = config(tmp_path / "c", text, global_batch=7168, micro_batch=2)
    with pytest.raises(DataError, match="would read some of them twice") as caught:
        prepare_for_model(run_config(data), ranks=ranks)
    (count,) = map(int, re.findall(r"has (\d+) samples", str(caught.value)))
    batch = count // (2 * ranks) * 2 * ranks
    advice = re.findall(r", or set data\.global_batch=(\d+)", str(caught.value))
    assert advice == [str(batch)] * (ranks < 512), "at 512 ranks no batch is small enough"
    if advice:
        prepare_for_model(run_config(data.model_copy(update={"global_batch": batch})), ranks=ranks)


def test_both_splits_are_refused_at_once_with_a_length_that_suits_both(tmp_path: Path):
    changes = {"sequence_length": 1 << 20, "global_batch": 1, "micro_batch": 1}
    data = config(tmp_path / "c", write_jsonl(tmp_path / "text.jsonl"), **changes)
    with pytest.raises(DataError, match=r"train.bin has(.|\n)*validation.bin has") as caught:
        prepare_for_model(run_config(data))
    (length,) = re.findall(r"or set data\.sequence_length=(\d+)$", str(caught.value))
    prepare_for_model(run_config(data.model_copy(update={"sequence_length": int(length)})))


def test_a_tokenizer_larger_than_the_model_is_refused(one: tuple[DataConfig, Corpora]):
    data, corpora = one
    tokens = corpora.tokenizer.vocabulary
    with pytest.raises(ConfigError, match=rf"model\.vocabulary=?{tokens}|at least {tokens}"):
        make_loader(run_config(data, f"model.vocabulary={tokens - 1}"), corpora, 0, 1, train=True)


def test_a_token_is_traced_back_to_its_document(tmp_path: Path):
    path = write_jsonl(tmp_path / "text.jsonl", 150)
    data = config(tmp_path / "c", path)
    (corpus,) = open_data(data).corpora
    wanted = [d for d in documents(data) if not d.is_validation(10)]
    whole = corpus.train.read(0, len(corpus.train)).tolist()
    ends = [at for at, token in enumerate(whole) if token == corpus.tokenizer.eod]
    start, last = ends[40] - 2, ends[43] + 1
    origins = list(find_origins(corpus.train, start, last - start + 1))
    assert [origin.document for origin in origins] == [40, 41, 42, 43, 44]
    assert [f"{o.file}:{o.place}" for o in origins] == [d.name for d in wanted[40:45]]
    assert origins[1].first_token == ends[40] + 1
