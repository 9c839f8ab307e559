"""Every sample predicts a token, and an epoch predicts each token once that can be predicted."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.data.batch import Batch, map_tensors
from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.errors import DataError
from tests.data.text_stream import predicted, samples_of

MODES = [
    ("joined", "stream"),
    ("joined", "best_fit"),
    ("separate", "stream"),
    ("separate", "best_fit"),
]
DOCUMENTS = st.lists(st.integers(1, 4) | st.sampled_from([1, 1, 1, 9, 30]), min_size=1, max_size=60)


def predictable(documents: list[int], length: int, mode: str, packing: str) -> set[int]:
    """Return the places that separate documents or one sequence predict."""
    starts = set(itertools.accumulate(documents, initial=0))
    total = sum(documents)
    last = (total - 1) // length * length if packing == "stream" else total - 1
    places = set(range(1, last + 1))
    return places - starts if mode == "separate" else places


@pytest.mark.parametrize(("mode", "packing"), MODES)
@given(DOCUMENTS, st.integers(1, 12))
def test_every_sample_predicts_a_token(
    mode: str, packing: str, documents: list[int], length: int
) -> None:
    wanted = predictable(documents, length, mode, packing)
    try:
        samples = samples_of(documents, length, mode, packing)
    except DataError:
        assert not wanted or (mode, packing) == ("joined", "best_fit")
        return
    found = predicted(samples, range(len(samples)), mode)
    assert all(found), "a sample predicts nothing"
    tokens = sum(found, Counter[int]())
    if (mode, packing) == ("joined", "best_fit"):  # whole documents, in an order of their own
        within = wanted - set(itertools.accumulate(documents, initial=0))
        assert not within - set(tokens), "each token but the first of a document"
    else:
        assert tokens == Counter(wanted)
    later = predicted(samples, range(len(samples), 2 * len(samples)), mode)
    assert sum(later, Counter[int]()) == tokens, "each epoch has the same tokens"


@pytest.mark.parametrize(("mode", "packing"), MODES)
@given(st.lists(st.integers(2, 9), min_size=8, max_size=40), st.integers(2, 8))
def test_nothing_is_left_out_of_documents_that_predict_everywhere(
    mode: str, packing: str, documents: list[int], length: int
) -> None:
    """So the order of samples is the one that a run of an older version has."""
    samples = samples_of(documents, length, mode, packing)
    if samples.__class__.__name__ == "PackedSamples":  # the rest of a document may be one token
        return
    assert samples.left_out == 0
    order = [samples.ranges(index) for index in range(2 * len(samples))]
    samples.set_lengths([LengthSegment(0, length, keeps_all=True)])
    assert [samples.ranges(index) for index in range(2 * len(samples))] == order


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_run_of_an_older_version_reads_all_samples(packing: str) -> None:
    documents = [1, 1, 1, 1, 3, 1, 1, 1, 1, 1]
    samples = samples_of(documents, 2, "separate", packing)
    kept = len(samples)
    assert samples.left_out > 0
    samples.set_lengths([LengthSegment(0, 2, keeps_all=True)])
    assert samples.left_out == 0
    assert len(samples) > kept
    assert not all(predicted(samples, range(len(samples)), "separate"))


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("masks", [None, [1, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]])
def test_the_losses_of_a_cut_sample_add_up(by, masks):
    """Also if no label of a part is predicted, and with other numbers of labels per sample."""
    labels = torch.arange(12).view(2, 6)
    mask = None if masks is None else torch.tensor([masks, [1] * 6], dtype=torch.float32)
    whole = Batch(labels, labels, labels, mask)
    losses = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    batch = whole.with_weights(by)
    parts = [
        (map_tensors(batch, partial(_columns, part)), losses[:, part])
        for part in (slice(0, 3), slice(3, 4), slice(4, 6))
    ]
    total = sum(part.mean_loss(of_part, by) for part, of_part in parts)
    assert total.item() == pytest.approx(whole.mean_loss(losses, by).item(), rel=1e-6)
    weight = sum(float(part.weight(by)) for part, _ in parts)
    assert weight == pytest.approx(float(whole.weight(by)), rel=1e-6)
    if by == "samples":
        sums = sum(part.loss_sums(of_part, end=7) for part, of_part in parts)
        torch.testing.assert_close(sums, whole.loss_sums(losses, end=7), rtol=1e-6, atol=0)


def _columns(part, tensor):
    return tensor[:, part]
