"""A small synthetic corpus, prepared once for all tests of this folder."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.config.data import DataConfig
from frontier_llm.data.corpus_parts import PartReader, SkippedTexts, plan_parts
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import Corpus, open_corpus
from frontier_llm.data.source import Document, Source, find_source
from frontier_llm.data.source_choice import choose_files


def config(directory: Path, path: Path | None, **changes: object) -> DataConfig:
    values: dict[str, object] = {
        "name": "tiny",
        "kind": "text",
        "path": None if path is None else str(path),
        "corpora": (),
        "blend_alpha": 0.3,
        "text_key": "text",
        "directory": str(directory),
        "tokenizer": None,
        "vocabulary": 400,
        "validation_percent": 10.0,
        "broken": "refuse",
        "unique": False,
        "objective": "causal",
        "sequence_length": 16,
        "global_batch": 8,
        "micro_batch": 2,
    }
    return DataConfig.model_validate({**values, **changes})


def write_jsonl(path: Path, documents: int = 200) -> Path:
    draw = random.Random(documents)
    words = ["river", "stone", "lantern", "of", "and", "the", "42", "naïve", "雪", "\n", "  "]
    with path.open("w") as stream:
        for number in range(documents):
            text = " ".join(draw.choices(words, k=40))
            stream.write(json.dumps({"id": number, "text": text}) + "\n")
    return path


def documents(settings: DataConfig) -> list[Document]:
    """Return all documents of a source in order."""
    source = source_of(settings)
    scans = [source.scan(index) for index in range(len(source.files))]
    reader = PartReader(source, settings.broken == "skip")
    return [
        document
        for part in plan_parts(scans)
        for _, _, document in reader.documents(part, SkippedTexts())
    ]


def source_of(settings: DataConfig) -> Source:
    """Return the chosen files. Those of a folder are not divided, however few they are."""
    (corpus,) = settings.sources
    source = choose_files(find_source(corpus, settings), corpus, settings, workers=1)
    return replace(source, divided_from=0 if source.single else None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("corpus")
    return prepare(config(base / "corpora", write_jsonl(base / "text.jsonl")))


@pytest.fixture
def corpus(folder: Path) -> Corpus:
    return open_corpus(folder)
