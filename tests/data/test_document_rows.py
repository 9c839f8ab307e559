"""Samples with the borders of documents: masks, positions, and which tokens an epoch predicts."""

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.config.data import DataConfig
from frontier_llm.data.batch import Batch
from frontier_llm.data.corpora import Corpora, open_data
from frontier_llm.data.document_rows import Row, document_batch
from frontier_llm.data.packing import padding_shares
from frontier_llm.data.run_loader import describe_samples, make_loader, make_windows
from tests.data.conftest import config, write_jsonl
from tests.data.test_run_loader import blend, run_config

LENGTH = 48
MODES = [("separate", "stream"), ("separate", "best_fit"), ("joined", "best_fit")]


def row(lengths: Sequence[int], *, continues: bool, padding: int = 0) -> Row:
    tokens = np.arange(100, 101 + sum(lengths) + padding)
    return Row(tokens, np.array(lengths), continues)


def test_a_batch_of_separate_documents() -> None:
    rows = [row([2, 1, 3], continues=True), row([4], continues=False, padding=2)]
    batch = document_batch(rows, [0, 1], separate=True)
    assert batch.tokens.tolist() == [list(range(100, 106))] * 2
    assert batch.labels.tolist() == [list(range(101, 107))] * 2
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [[1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert batch.cumulative_lengths is not None
    assert batch.cumulative_lengths.tolist() == [[0, 2, 3, 6], [0, 4, 6, 6]]
    assert batch.cumulative_lengths.dtype == torch.int32


def test_a_batch_of_joined_documents_masks_what_follows_the_last_one() -> None:
    rows = [row([2, 4], continues=False), row([4], continues=False, padding=2)]
    batch = document_batch(rows, [0, 1], separate=False)
    assert batch.cumulative_lengths is None
    assert batch.positions.tolist() == [list(range(6))] * 2
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]


def test_the_loss_is_the_mean_of_the_predicted_tokens() -> None:
    rows = [row([2, 1, 3], continues=True), row([4], continues=False, padding=2)]
    batch = document_batch(rows, [0, 1], separate=True)
    losses = torch.arange(12.0).view(2, 6)
    assert batch.mean_loss(losses).item() == pytest.approx(
        ((0 + 3 + 4 + 5) / 4 + (6 + 7 + 8) / 3) / 2
    )


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "text.jsonl")


def opened(lines: Path, documents: str, packing: str, **changes: Any) -> tuple[DataConfig, Corpora]:
    data = config(
        lines.parent / "corpora",
        lines,
        documents=documents,
        packing=packing,
        sequence_length=LENGTH,
        **changes,
    )
    return data, open_data(data)


@pytest.mark.parametrize(("documents", "packing"), MODES)
def test_an_epoch_predicts_each_token_once(lines: Path, documents: str, packing: str) -> None:
    """All tokens but the first of each document; joined documents have a few more."""
    data, corpora = opened(lines, documents, packing)
    settings, (corpus,) = run_config(data), corpora.corpora
    windows: Any = make_windows(settings, corpora, train=True)
    make_batch = partial(document_batch, separate=documents == "separate")
    predicted: Counter[int] = Counter()
    borders = [*corpus.train.documents_within(0, len(corpus.train)).tolist(), len(corpus.train)]
    whole = corpus.train.read(0, len(corpus.train)).astype(np.int64)
    for index in range(len(windows)):
        batch = make_batch([windows[index]], [index])
        at = np.concatenate([np.arange(start, start + n) for start, n in windows.ranges(index)])
        inputs = at[: windows[index].lengths.sum()]
        assert np.array_equal(batch.tokens[0, : len(inputs)].numpy(), whole[inputs])
        assert batch.loss_mask is not None
        counted = np.flatnonzero(batch.loss_mask[0].numpy())
        if documents == "separate":
            assert np.array_equal(batch.labels[0].numpy()[counted], whole[inputs[counted] + 1])
            predicted.update((inputs[counted] + 1).tolist())
        else:
            predicted.update(batch.labels[0].numpy()[counted].tolist())
        if packing == "best_fit":
            starts = [start for start, _ in windows.ranges(index)]
            assert all(s in borders or (s - borders[np.searchsorted(borders, s) - 1]) % LENGTH == 0
                       for s in starts)  # fmt: skip
    if documents == "joined":
        return
    not_first = set(range(len(corpus.train))) - set(borders)
    read = len(windows) * LENGTH if packing == "stream" else len(corpus.train)
    assert predicted == Counter(token for token in not_first if token <= read)


@pytest.mark.parametrize(("documents", "packing"), MODES)
@pytest.mark.parametrize("corpora_count", [1, 2])
def test_samples_do_not_depend_on_the_layout(
    lines: Path, tmp_path: Path, documents: str, packing: str, corpora_count: int
) -> None:
    """Nor does the digest of a step; and a stage that reads no tokens knows the borders."""
    if corpora_count == 1:
        data, corpora = opened(lines, documents, packing)
    else:
        data = blend(tmp_path, documents=documents, packing=packing, sequence_length=LENGTH)
        corpora = open_data(data)
    found, digests = [], []
    for ranks, micro_batch in ((1, 8), (2, 2), (4, 1)):
        settings = run_config(data.model_copy(update={"micro_batch": micro_batch}))
        steps: list[Any] = []
        for rank in range(ranks):
            with closing(make_loader(settings, corpora, rank, ranks, train=True)) as loader:
                steps.append(loader.read_step(8))
        batches = itertools.chain(*zip(*(s.micro_batches for s in steps), strict=True))
        found.append([line for batch in batches for line in listed(batch)])
        digests.append(sum(step.digest for step in steps))
    assert found[0] == found[1] == found[2]
    assert digests[0] == digests[1] == digests[2]
    settings = run_config(data)
    windows = make_windows(settings, corpora, train=True, reads=False)
    with closing(make_loader(settings, corpora, 0, 1, train=True, windows=windows)) as loader:
        without = [line for batch in loader.micro_batches(8) for line in listed(batch)]
    assert [line[2:] for line in without] == [line[2:] for line in found[0]]
    assert not any(any(line[0]) for line in without)


def listed(batch: Batch) -> list[tuple[list, list, list, list, list]]:
    """Tokens, labels, positions, mask and borders of each sample."""
    assert batch.loss_mask is not None
    borders: list[list[int]] = [[]] * batch.samples
    if batch.cumulative_lengths is not None:
        borders = [sorted(set(line)) for line in batch.cumulative_lengths.tolist()]
    columns = (batch.tokens, batch.labels, batch.positions, batch.loss_mask)
    return list(zip(*(x.tolist() for x in columns), borders, strict=True))  # type: ignore[arg-type]


def test_the_number_of_samples_and_the_padding_are_told(lines: Path) -> None:
    data, corpora = opened(lines, "separate", "best_fit")
    text = describe_samples(run_config(data), corpora)
    samples: Any = make_windows(run_config(data), corpora, train=True)
    assert text.startswith(f"{len(samples):,} samples per epoch of whole documents, ")
    assert text.endswith(f"{padding_shares([samples.packing])[0]:.2%} padding")
