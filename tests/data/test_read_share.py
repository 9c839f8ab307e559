"""The share of pairs that separate documents read, counted in the samples of a run."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.commands import plan
from frontier_lab.predicted_run import with_known_share
from frontier_llm.cli.experiments import composed
from frontier_llm.data.corpora import open_all, prepare_all
from frontier_llm.data.packing import pack
from frontier_llm.data.read_share import read_share, with_read_share
from frontier_llm.data.run_loader import window_corpus
from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.geometry.flops import forward_flops, score_pairs, step_hardware_flops
from frontier_llm.geometry.lengths import SampleLengths
from tests.data.text_stream import samples_of
from tests.geometry.models import make_model

DOCUMENTS = st.lists(st.integers(1, 60) | st.sampled_from([1, 300]), min_size=3, max_size=60)


LARGE = (
    *("model=llama3_8b", "cluster=h100_8", "planner.nodes=[8]", "data.sequence_length=32768"),
    *("data.global_batch=64", "data.micro_batch=1", "parallel.tensor=4", "parallel.pipeline=1"),
    *("sharding=zero1", "recompute=full", "precision=bf16"),
)


def _pairs(row):
    """Count the pairs of a sample's tokens that have the same document, one query at a time."""
    documents = np.repeat(np.arange(len(row.lengths)), row.lengths)
    return int((documents[:, None] == documents).sum())


@given(DOCUMENTS, st.integers(2, 40))
def test_flops_are_those_of_the_documents_of_the_samples(documents, length):
    documents = [2, *documents]  # documents of one token alone make no sample
    if sum(documents) < 2 * length:
        return
    samples = samples_of(documents, length, "separate", "stream")
    samples.set_lengths([LengthSegment(0, length, keeps_all=True)])  # none is left out
    pairs = np.mean([_pairs(samples[index]) for index in range(len(samples))])
    share = read_share(np.array(documents), length, "stream")
    model = make_model(layers=3)
    width = model.heads * model.head_dim
    lengths = SampleLengths(0, length)
    counted = forward_flops(model, lengths, share)
    assert counted.attention == pytest.approx(3 * 4 * width * pairs, rel=1e-9)
    whole = forward_flops(model, lengths)
    assert counted.total - counted.attention == pytest.approx(whole.total - whole.attention)
    assert score_pairs(model, 0, length, share, causal=True) == pytest.approx(pairs / 2)
    extra = step_hardware_flops(model, lengths, 1, "selective", share) - 3 * counted.total
    assert extra == pytest.approx(counted.attention)


@given(DOCUMENTS, st.integers(2, 40))
def test_packed_samples_read_what_whole_documents_read(documents, length):
    """All but the last sample are full only on average, so the counts differ by the padding."""
    pairs, tokens = np.square(pack(np.array(documents), length).lengths).sum(), sum(documents)
    share = read_share(np.array(documents), length, "best_fit")
    assert share == pytest.approx(min(1, pairs / -(-tokens // length) / length**2))


def test_one_document_per_sample_reads_all():
    assert read_share(np.array([64] * 9), 8, "stream") == 1.0
    assert read_share(np.array([8] * 9), 8, "stream") == 1.0
    assert read_share(np.array([8] * 9), 8, "best_fit") == 1.0
    assert read_share(np.array([1] * 90), 10, "stream") == pytest.approx(0.1)


def test_a_window_reads_at_most_its_documents():
    model = make_model(layers=1, window=8)
    assert score_pairs(model, 0, 100, 0.04, causal=False) == 400, "documents of 4 tokens"
    assert score_pairs(model, 0, 100, 0.5, causal=False) == 800


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text"
    text.mkdir()
    for name, lines in (("a", 40), ("b", 4), ("c", 90), ("d", 7), ("e", 30)):
        (text / f"{name}.txt").write_text("some words of a document\n" * lines)
    overrides = (
        *("data=text", f"data.path={text}", f"data.directory={folder / 'out'}"),
        *("data.documents=separate", "data.vocabulary=280", "data.sequence_length=64"),
        *("data.validation_percent=20", "cluster=h100_8", "launch.ranks=1", "precision=bf16"),
    )
    return overrides, prepare_all(composed(*overrides).data)


def test_the_share_is_measured_in_the_prepared_corpus(prepared):
    overrides, folders = prepared
    config, lines = composed(*overrides), []
    corpora = open_all(config.data, folders)
    windows = window_corpus(config, corpora.corpora[0], train=True)
    pairs = np.mean([_pairs(windows[index]) for index in range(len(windows))])
    share = with_known_share(config, lines.append).data.read_share
    assert share == with_read_share(config, folders).data.read_share
    assert share == pytest.approx(pairs / 64**2, rel=1e-6)
    assert f"{share:.1%}" in lines[0]
    joined = composed(*overrides, "data.documents=joined")
    assert with_known_share(joined, lines.append) == joined, "joined documents read all"


def test_an_unknown_share_counts_as_joined_and_is_said(prepared, tmp_path):
    lines = []
    config = composed(*prepared[0], f"data.directory={tmp_path}")
    assert with_known_share(config, lines.append).data.pairs_read == 1.0
    assert "not prepared" in lines[0]
    config = composed(*prepared[0], f"data.path={tmp_path / 'elsewhere'}")
    assert with_known_share(config, lines.append).data.pairs_read == 1.0


def test_a_plan_counts_what_separate_documents_read(tmp_path):
    def planned(*more):
        found = tmp_path / "found.json"
        plan.main(["--this", "--json", str(found), *LARGE, *more])
        return json.loads(found.read_text())["candidates"][0]

    joined, separate, short = (
        planned(f"data.documents={documents}", *more)
        for documents, *more in (
            ("joined",),
            ("separate", "data.read_share=1"),
            ("separate", "data.read_share=0.1"),
        )
    )
    assert joined["step_seconds"] == separate["step_seconds"] > 1.2 * short["step_seconds"]
    assert joined["mfu"] == separate["mfu"]
    ratio = short["hardware_tflops_per_device"] * short["step_seconds"]
    assert ratio < joined["hardware_tflops_per_device"] * joined["step_seconds"] / 1.2
