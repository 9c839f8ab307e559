"""The order of samples over changes of their length: what an epoch has read is not read again."""

from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.data.blend import Schedule
from frontier_llm.data.corpora import BlendedSamples
from frontier_llm.data.prepared_corpus import Samples
from frontier_llm.data.sample_order import LengthSegment, resumed_lengths
from tests.data.text_stream import predicted, samples_of

CHANGES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=4)
"""(samples since the last change, new length)."""


def segments_of(first: int, changes: list[tuple[int, int]]) -> list[LengthSegment]:
    segments, sample = [LengthSegment(0, first)], 0
    for count, length in changes:
        sample += count
        segments.append(LengthSegment(sample, length))
    return segments


def inputs_of(samples: Samples, index: int) -> list[int]:
    """Return the places of the inputs of a sample."""
    *others, (start, count) = samples.ranges(index)
    return [t for s, n in [*others, (start, count - 1)] for t in range(s, s + n)]


@given(st.integers(40, 200), st.integers(1, 20), CHANGES)
def test_no_token_is_an_input_twice_in_an_epoch(
    tokens: int, first: int, changes: list[tuple[int, int]]
) -> None:
    segments = segments_of(first, changes)
    samples = samples_of([tokens], segments[-1].tokens, "joined", "stream")
    samples.set_lengths(segments)
    end = segments[-1].first_sample + 2 * tokens
    epochs: dict[int, Counter[int]] = {}
    for index in range(end):
        epochs.setdefault(samples.epoch(index), Counter()).update(inputs_of(samples, index))
    assert list(epochs) == sorted(epochs), "epochs follow each other"
    for epoch, read in epochs.items():
        assert max(read.values()) == 1, f"epoch {epoch} reads a token twice"
        if epoch < max(epochs):
            longest = max(segment.tokens for segment in segments)
            # less than a sample at the end of the epoch, and the rest of the stream
            assert len(read) > tokens - 1 - 2 * longest


@given(st.integers(40, 200), st.integers(1, 20), CHANGES)
def test_a_change_leaves_earlier_samples_and_later_lengths_as_they_are(
    tokens: int, first: int, changes: list[tuple[int, int]]
) -> None:
    segments = segments_of(first, changes)
    samples = samples_of([tokens], segments[-1].tokens, "joined", "stream")
    samples.set_lengths(segments)
    for number, segment in enumerate(segments):
        before = samples_of([tokens], segment.tokens, "joined", "stream")
        before.set_lengths(segments[: number + 1])
        end = segments[number + 1].first_sample if number + 1 < len(segments) else 90
        for index in range(end):
            assert samples.ranges(index) == before.ranges(index)
        for index in range(segment.first_sample, end):
            assert len(inputs_of(samples, index)) == segment.tokens
            assert len(samples[index]) == segment.tokens + 1


@given(st.lists(st.integers(2, 9), min_size=30, max_size=60), st.integers(2, 9), CHANGES)
def test_separate_documents_have_borders_where_windows_are_joined(
    documents: list[int], first: int, changes: list[tuple[int, int]]
) -> None:
    segments = segments_of(first, changes)
    samples = samples_of(documents, segments[-1].tokens, "separate", "stream")
    samples.set_lengths(segments)
    for index in range(segments[-1].first_sample, segments[-1].first_sample + 40):
        row, ranges = samples[index], samples.ranges(index)
        assert row.lengths.sum() == segments[-1].tokens
        (found,) = predicted(samples, [index], "separate")
        inputs = [t for s, n in ranges for t in range(s, s + n)][:-1]
        ends = {s + n - 1 for s, n in ranges[:-1]}
        starts = {sum(documents[:k]) for k in range(len(documents) + 1)}
        wanted = [t + 1 for t in inputs if t not in ends and t + 1 not in starts]
        assert found == Counter(wanted)


def test_half_an_epoch_then_twice_the_length() -> None:
    samples = samples_of([64 * 100 + 1], 128, "joined", "stream")
    samples.set_lengths([LengthSegment(0, 64), LengthSegment(50, 128)])
    before = {t for index in range(50) for t in inputs_of(samples, index)}
    after = [t for index in range(50, 75) for t in inputs_of(samples, index)]
    assert len(before) + len(after) == 6400
    assert not before & set(after)
    assert samples.epoch(74) == 0
    assert samples.epoch(75) == 1
    assert all(len(samples.ranges(index)) == 1 for index in range(75, 125))


@pytest.mark.parametrize(
    ("next_sample", "tokens", "wanted"),
    [(40, 64, [(0, 64)]), (40, 32, [(0, 64), (40, 32)]), (50, 128, [(0, 64), (50, 128)]),
     (51, 128, [(0, 64), (50, 128)]), (70, 64, [(0, 64), (50, 128), (70, 64)]),
     (0, 64, [(0, 64)])],
)  # fmt: skip
def test_a_resume_keeps_what_was_read_before(
    next_sample: int, tokens: int, wanted: list[tuple[int, int]]
) -> None:
    history = [asdict(LengthSegment(0, 64)), asdict(LengthSegment(50, 128))]
    found = resumed_lengths(history, next_sample, tokens)
    assert [(segment.first_sample, segment.tokens) for segment in found] == wanted


@given(st.integers(1, 150), st.integers(1, 9), st.floats(0.1, 0.9))
def test_each_corpus_of_a_blend_goes_on_where_it_was(
    change: int, length: int, share: float
) -> None:
    schedule = Schedule.starting({"a": share, "b": 1 - share}, 5)
    samples = {name: samples_of([400], length, "joined", "stream") for name in "ab"}
    blend = BlendedSamples(samples, schedule)
    blend.set_lengths([LengthSegment(0, 4), LengthSegment(change, length)])
    read: dict[tuple[int, int], Counter[int]] = {}
    for index in range(change + 80):
        corpus, number = schedule.locate(index)
        of_corpus = samples["ab"[corpus]]
        assert len(blend[index]) == (4 if index < change else length) + 1
        epoch = read.setdefault((corpus, of_corpus.epoch(number)), Counter())
        epoch.update(inputs_of(of_corpus, number))
    assert all(max(counts.values()) == 1 for counts in read.values())
