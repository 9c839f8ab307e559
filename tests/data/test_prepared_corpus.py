import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from frontier_llm.data.corpus_manifest import TYPE_CODES, Split
from frontier_llm.data.prepared_corpus import Corpus, Manifest, Samples, TokenStream, open_corpus
from frontier_llm.errors import DataError
from tests.properties import examples


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the prepared corpus that a test may damage."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def samples(corpus: Corpus, **changes: object) -> Samples:
    options = {"sequence_length": 16, "seed": 7, "digest": corpus.manifest.digest, **changes}
    return Samples(corpus.train, **options)


def test_a_stream_is_the_concatenation_of_all_documents(folder: Path, corpus: Corpus):
    whole = np.fromfile(folder / "train.bin", dtype=np.uint16)
    assert len(corpus.train) == len(whole) == corpus.manifest.train.tokens
    assert np.array_equal(corpus.train.read(0, len(whole)), whole)
    assert np.array_equal(corpus.train.read(1000, 50), whole[1000:1050])
    assert np.array_equal(corpus.train.read(len(whole) - 1, 1), whole[-1:])


@pytest.mark.parametrize(("start", "beyond"), [(-1, -10), (0, 1), (1, 0)])
def test_reading_beyond_the_end_is_refused(corpus: Corpus, start: int, beyond: int):
    with pytest.raises(DataError, match=r"train\.idx is damaged"):
        corpus.train.read(start, len(corpus.train) + beyond)


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order(corpus: Corpus):
    run = samples(corpus)
    n = len(run)
    whole = corpus.train.read(0, len(corpus.train))
    assert n == (len(whole) - 1) // 16
    orders = [[run.window(epoch * n + i) for i in range(n)] for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for index in (0, n - 1, n, 3 * n - 1):
        start = orders[index // n][index % n] * 16
        assert run[index].dtype == np.int64
        assert np.array_equal(run[index], whole[start : start + 17])


def test_each_token_is_an_input_once_per_epoch(corpus: Corpus):
    run = samples(corpus, shuffle=False)
    whole = corpus.train.read(0, len(corpus.train))
    inputs = np.concatenate([run[i][:-1] for i in range(len(run))])
    labels = np.concatenate([run[i][1:] for i in range(len(run))])
    assert np.array_equal(inputs, whole[: len(inputs)])
    assert np.array_equal(labels, whole[1 : len(labels) + 1])
    assert len(whole) - 1 - len(inputs) < 16


def test_without_shuffle_each_epoch_is_in_order(corpus: Corpus):
    run = samples(corpus, shuffle=False)
    assert [run.window(i) for i in range(2 * len(run))] == 2 * list(range(len(run)))


def test_the_order_depends_on_seed_and_corpus_and_nothing_else(corpus: Corpus, folder: Path):
    def order(run: Samples) -> list[int]:
        return [run.window(i) for i in range(len(run))]

    first = order(samples(corpus))
    assert order(samples(open_corpus(folder))) == first
    assert order(samples(corpus, seed=8)) != first
    assert order(samples(corpus, digest="other")) != first


@examples(50)
@given(st.integers(0, 2**60))
def test_any_sample_is_read_directly(folder: Path, index: int):
    corpus = open_corpus(folder)
    run = samples(corpus)
    assert 0 <= run.window(index) < len(run)
    assert run[index].shape == (17,)


def test_a_sample_that_just_fits_and_one_that_does_not(corpus: Corpus):
    tokens = len(corpus.train)
    run = samples(corpus, sequence_length=tokens - 1)
    assert len(run) == 1
    assert np.array_equal(run[5], corpus.train.read(0, tokens))
    with pytest.raises(DataError, match=r"fewer than one sample of data.sequence_length=\d+"):
        samples(corpus, sequence_length=tokens)


@pytest.mark.parametrize(
    "name", ["train.bin", "train.idx", "train.places", "validation.bin", "validation.idx"]
)
@pytest.mark.parametrize("damage", ["missing", "short", "long", "empty"])
def test_a_file_of_the_wrong_size_is_refused(copy: Path, name: str, damage: str):
    path = copy / name
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, {"short": size - 1, "long": size + 2, "empty": 0}[damage])
    with pytest.raises(DataError, match=rf"{name} is damaged: .*\n  do: delete the folder"):
        open_corpus(copy)


def test_an_index_of_another_corpus_is_refused(copy: Path):
    with (copy / "train.idx").open("r+b") as stream:
        stream.write(b"NOINDEX")
    with pytest.raises(DataError, match=r"train\.idx is damaged: it does not match the manifest"):
        open_corpus(copy)


def test_an_index_with_wrong_ends_is_refused(copy: Path):
    with (copy / "train.idx").open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(b"\1" * 8)
    with pytest.raises(DataError, match=r"train.idx is damaged: it cannot be opened"):
        open_corpus(copy)


def test_verify_detects_changed_tokens(copy: Path):
    with (copy / "train.bin").open("r+b") as stream:
        stream.write(b"\7\0\7\0")
    open_corpus(copy)
    with pytest.raises(DataError, match=r"train\.bin is damaged"):
        open_corpus(copy, verify=True)


def test_another_tokenizer_is_refused(copy: Path):
    with (copy / "tokenizer.model").open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(DataError, match=r"tokenizer\.\* is damaged"):
        open_corpus(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Invalid JSON"),
        ("{}", "format: Field required"),
        ('{"format": 1}', "format: Input should be 3"),
    ],
)
def test_an_invalid_manifest_is_refused(copy: Path, content: str | None, message: str):
    path = copy / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=message):
        Manifest.load(path)


def test_tokens_beyond_2_to_the_31_are_read(tmp_path: Path, corpus: Corpus):
    """Use a sparse file of 5 GiB, which takes no disk space."""
    documents = [2**30, 2**30, 2**29 + 1000]
    tokens = sum(documents)
    assert tokens > 2**31
    prefix = tmp_path / "train"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.sequence_lengths += documents
    builder.document_indices += [1, 2, 3]
    builder.finalize(f"{prefix}.idx")
    Path(f"{prefix}.places").write_bytes(bytes(8 * len(documents)))
    os.truncate(f"{prefix}.bin", 2 * tokens)
    marked = np.arange(1, 18, dtype=np.uint16)
    last = (tokens - 1) // 16 - 1
    with Path(f"{prefix}.bin").open("r+b") as stream:
        stream.seek(2 * last * 16)
        stream.write(marked.tobytes())
    split = Split(documents=3, tokens=tokens, text_bytes=0, bin_sha256="")
    stream = TokenStream(prefix, corpus.manifest.model_copy(update={"train": split}), split)
    assert len(stream) == tokens
    run = Samples(stream, 16, seed=0, digest="d", shuffle=False)
    assert np.array_equal(run[last], marked)
    assert not run[last - 2].any()
    shuffled = Samples(stream, 16, seed=0, digest="d")
    assert max(shuffled.window(i) for i in range(200)) * 16 > 2**31
    assert all(shuffled[i].shape == (17,) for i in range(200))


def test_the_codes_of_token_types_are_those_of_megatron():
    for name, code in TYPE_CODES.items():
        assert code == DType.code_from_dtype(np.dtype(name).type)
