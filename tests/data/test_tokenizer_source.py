"""A tokenizer is found at a path, copied, identified by a digest, and carried by a corpus."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from frontier_llm.config import decode
from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpora import open_data
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import open_corpus
from frontier_llm.data.run_loader import prepare_for_model
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.data.source import Source
from frontier_llm.data.source_format import sha256_of
from frontier_llm.data.tokenizer_source import (
    copy_tokenizer,
    digest_tokenizer,
    open_tokenizer,
    tokenizer_files,
)
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config, documents, write_jsonl
from tests.data.tokenizer_families import FAMILIES, train_family
from tests.values import tiny_values

library = pytest.importorskip("tokenizers")

TEXTS = ["river stone lantern of and the 42\n", "naïve 雪 the river's stones\n\n  of 7"] * 30


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a family, as Hugging Face publishes it."""
    return train_family(request.param, TEXTS, 290, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_family("gpt2", TEXTS, 290, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model."""
    path = tmp_path_factory.mktemp("model") / "own.model"
    train_tokenizer(TEXTS, 290, path)
    return path


def test_a_corpus_has_the_ids_of_the_library(tmp_path: Path, published: Path):
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    settings = config(tmp_path / "corpora", text, tokenizer=str(published))
    corpus = open_corpus(prepare(settings, workers=2), verify=True)
    theirs = library.Tokenizer.from_file(str(published / "tokenizer.json"))
    wanted: dict[bool, list[list[int]]] = {False: [], True: []}
    end = theirs.token_to_id(
        json.loads((published / "tokenizer_config.json").read_text())["eos_token"]
    )
    for document in documents(settings):
        ids = theirs.encode(document.text, add_special_tokens=False).ids
        wanted[document.is_validation(10)].append([*ids, end])
    for split, stream in ((False, corpus.train), (True, corpus.validation)):
        assert wanted[split]
        assert [tokens.tolist() for tokens in IndexedDataset(str(stream.prefix))] == wanted[split]
    assert corpus.tokenizer.eod == corpus.manifest.eod == end
    assert corpus.manifest.tokenizer_sha256 == digest_tokenizer(published)


def test_the_result_does_not_depend_on_the_workers(tmp_path: Path, gpt2: Path):
    text = write_jsonl(tmp_path / "text.jsonl", 300)
    digests = {
        open_corpus(
            prepare(config(tmp_path / str(workers), text, tokenizer=str(gpt2)), workers=workers)
        ).manifest.digest
        for workers in (1, 3)
    }
    assert len(digests) == 1


def test_a_prepared_corpus_does_not_need_the_original_files(tmp_path: Path, gpt2: Path):
    source = tmp_path / "published"
    shutil.copytree(gpt2, source)
    settings = config(tmp_path / "c", write_jsonl(tmp_path / "t.jsonl"), tokenizer=str(source))
    folder = prepare(settings)
    shutil.rmtree(source)
    assert sorted(path.name for path in folder.glob("tokenizer*")) == [
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    tokenizer = open_corpus(folder).tokenizer
    assert tokenizer.decode(tokenizer.encode("naïve 雪")) == "naïve 雪"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_changed_tokenizer_of_a_corpus_is_found(
    tmp_path: Path, gpt2: Path, name: str, missing: bool
):
    text = write_jsonl(tmp_path / "t.jsonl")
    folder = prepare(config(tmp_path / "c", text, tokenizer=str(gpt2)))
    if missing:
        (folder / name).unlink()
    else:
        with (folder / name).open("a") as stream:
            stream.write(" ")
    with pytest.raises(DataError, match=r"tokenizer\.\* is damaged(.|\n)*prepared again"):
        open_corpus(folder)


def test_the_end_of_a_document_can_be_chosen(tmp_path: Path, published: Path, model: Path):
    text = write_jsonl(tmp_path / "t.jsonl")
    for tokenizer, end in ((published, "the"), (model, "\n")):  # the text has "the"
        values = {"tokenizer": str(tokenizer), "broken": "skip"}
        usual = prepare(config(tmp_path / "c", text, **values))
        changed = prepare(config(tmp_path / "c", text, **values, end_of_document=end))
        assert usual != changed
        corpus = open_corpus(changed)
        assert corpus.tokenizer.eod == open_tokenizer(tokenizer).id_of(end)
        assert all(
            tokens[-1] == corpus.tokenizer.eod for tokens in IndexedDataset(str(changed / "train"))
        )
    with pytest.raises(ConfigError, match=r"data\.end_of_document\n  got:    '<end>'"):
        prepare(config(tmp_path / "c", text, tokenizer=str(model), end_of_document="<end>"))


def test_files_are_found(tmp_path: Path, gpt2: Path, model: Path):
    settings = gpt2 / "tokenizer_config.json"
    both = {"tokenizer.json": gpt2 / "tokenizer.json", "tokenizer_config.json": settings}
    assert tokenizer_files(gpt2) == tokenizer_files(gpt2 / "tokenizer.json") == both
    assert tokenizer_files(model) == {"tokenizer.model": model}
    for name in ("spiece.model", "tokenizer.model", "tokenizer.json"):
        shutil.copyfile(gpt2 / name if name.endswith("json") else model, tmp_path / name)
        assert next(iter(tokenizer_files(tmp_path).values())) == tmp_path / name
    copies = tmp_path / "copies"
    copies.mkdir()
    assert copy_tokenizer(model, copies) == copies / "tokenizer.model"
    assert digest_tokenizer(copies) == digest_tokenizer(model) == sha256_of(model)


def test_digests_cover_the_settings(tmp_path: Path, gpt2: Path):
    digests = {digest_tokenizer(gpt2)}
    copy = copy_tokenizer(gpt2, tmp_path)
    assert {digest_tokenizer(tmp_path), digest_tokenizer(copy)} == digests
    for change in ("{}", '{"eos_token": "the"}'):
        (tmp_path / "special_tokens_map.json").write_text(change)
        digests.add(digest_tokenizer(tmp_path))
    assert len(digests) == 3


def test_a_path_without_a_tokenizer_is_refused_before_text_is_read(tmp_path: Path, monkeypatch):
    text = write_jsonl(tmp_path / "text.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    monkeypatch.setattr(Source, "scan", None)
    for path in ("nowhere", "empty", "bad.json", "text.jsonl"):
        with pytest.raises(
            ConfigError, match=r"data\.tokenizer\n  got: (.|\n)*\n  do:     set data"
        ):
            prepare(config(tmp_path / "c", text, tokenizer=str(tmp_path / path)))
    assert not (tmp_path / "c").exists()


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, gpt2: Path, monkeypatch):
    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for use in (digest_tokenizer, open_tokenizer):
        with pytest.raises(ConfigError, match=r"can be read: Permission denied\n  do:     permit"):
            use(gpt2)


def test_a_tokenizer_larger_than_the_model_is_refused_before_text_is_read(
    tmp_path: Path, gpt2: Path, monkeypatch
):
    values = tiny_values("data=text", f"data.path={write_jsonl(tmp_path / 't.jsonl')}",
                         f"data.directory={tmp_path}/c", f"data.tokenizer={gpt2}",
                         "model.vocabulary=289")  # fmt: skip
    with monkeypatch.context() as context:
        context.setattr(Source, "scan", None)
        with pytest.raises(ConfigError) as raised:
            prepare_for_model(decode(values))
    assert (raised.value.key, raised.value.got) == ("model.vocabulary", 289)
    assert raised.value.wants == "at least 290: the tokenizer's 290 tokens"
    assert raised.value.todo == "set model.vocabulary=290, or use another tokenizer"
    values["model"]["vocabulary"] = 290
    assert len(prepare_for_model(decode(values))) == 1


def test_the_corpora_of_a_blend_share_a_given_tokenizer(tmp_path: Path, gpt2: Path):
    paths = [str(write_jsonl(tmp_path / f"{count}.jsonl", count)) for count in (100, 150)]
    blend = [{"name": str(number), "path": path} for number, path in enumerate(paths)]
    settings: DataConfig = config(
        tmp_path / "c", None, kind="blend", corpora=blend, tokenizer=str(gpt2)
    )
    (tmp_path / "z.txt").write_text("plain words")
    third = CorpusConfig(name="z", path=str(tmp_path / "z.txt"), text_key="absent")
    added = (*settings.corpora, third)
    with pytest.raises(ConfigError, match=r"text_key(.|\n)*plain text"):
        open_data(settings.model_copy(update={"corpora": added}))
    assert not (tmp_path / "c").exists(), "refused before the first corpus is prepared"
    corpora = open_data(settings)
    assert corpora.tokenizer.eod == open_tokenizer(gpt2).eod
    assert {corpus.manifest.tokenizer_sha256 for corpus in corpora.corpora} == {
        digest_tokenizer(gpt2)
    }
    assert all(np.all(corpus.train.read(0, 9) < 290) for corpus in corpora.corpora)
