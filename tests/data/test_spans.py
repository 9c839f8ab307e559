import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import decode
from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.config.reading import check_data
from frontier_llm.config.span_lengths import corrupted, sentinels_of, span_lengths
from frontier_llm.data.spans import START, SpanCorruption, restore
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import check_vocabulary
from frontier_llm.errors import ConfigError
from tests.properties import examples
from tests.values import TINY_T5, tiny_values

EOS, SENTINELS = 1, list(range(999, 899, -1))


def corruption(text: int, key: int = 5, inputs: int | None = None) -> SpanCorruption:
    return SpanCorruption(text, inputs or corrupted(text).inputs, SENTINELS, EOS, key)


def draw_text(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 800, tokens)


@examples(100)
@given(st.integers(14, 1300), st.integers(0, 2**50), st.integers(0, 2**64 - 1))
def test_filling_the_sentinels_restores_the_text(tokens: int, index: int, key: int):
    text = draw_text(tokens, index % 7)
    inputs, targets = corruption(tokens, key).corrupt(text, index)
    lengths = corrupted(tokens)
    assert (len(inputs), len(targets)) == (lengths.inputs, lengths.targets)
    assert inputs[-1] == targets[-1] == EOS
    sentinels = SENTINELS[: lengths.spans]
    assert [t for t in inputs if t >= 900] == [t for t in targets if t >= 900] == sentinels
    assert restore(inputs.tolist(), targets.tolist(), SENTINELS, EOS) == text.tolist()


def test_lengths_are_those_of_t5():
    assert span_lengths(512).text == 568
    assert span_lengths(512).targets == 114
    found = span_lengths(1024)
    assert (found.text, found.inputs, found.targets) == (1137, 1024, 229)


def test_spans_depend_only_on_key_and_index():
    text = draw_text(568)
    first = corruption(568).corrupt(text, 3)
    assert all(map(np.array_equal, first, corruption(568).corrupt(text, 3)))
    for other in (corruption(568).corrupt(text, 4), corruption(568, key=6).corrupt(text, 3)):
        assert not np.array_equal(first[0], other[0])


def test_all_tokens_are_equally_likely_removed_and_spans_are_short():
    tokens, runs = 568, 400
    text = np.arange(10_000, 10_000 + tokens)
    taken, spans = np.zeros(tokens), []
    for index in range(runs):
        _, targets = corruption(tokens).corrupt(text, index)
        taken[targets[targets >= 10_000] - 10_000] += 1
        starts = np.flatnonzero(targets < 10_000)
        spans += np.diff(starts).tolist()
    inner = taken[20:-20] / runs
    assert inner.mean() == pytest.approx(0.15, abs=0.01)
    assert 0.05 < inner.min() < inner.max() < 0.3
    lengths = np.array(spans) - 1
    assert lengths.mean() == pytest.approx(3, abs=0.1)
    assert set(lengths.tolist()) > {1, 2, 3, 4, 5, 6}


class NamedTokens(Tokenizer):
    """A tokenizer of 500 tokens of text, and of sentinels somewhere among the other tokens."""

    vocabulary = 0

    def __init__(self, vocabulary: int, sentinels: dict[str, int]) -> None:
        self.vocabulary, self._ids = vocabulary, sentinels

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)


NamedTokens.__abstractmethods__ = frozenset()  # no text is encoded


@examples(60)
@given(
    st.integers(14, 30_000),
    st.sampled_from([0, 1, 32, 100, 300]),
    st.booleans(),
    st.integers(0, 40),
    st.sampled_from(["<extra_id_{}>", "\u2581<extra_id_{}>"]),
)
def test_no_sentinel_is_a_token_of_text(
    inputs: int, named: int, ascends: bool, others: int, name: str
):
    ids = list(range(500, 500 + named))[:: 1 if ascends else -1]
    names = {name.format(number): token for number, token in enumerate(ids)}
    tokenizer = NamedTokens(500 + named + others, names)
    count = sentinels_of(inputs)
    assert count >= span_lengths(inputs).spans
    sentinels = tokenizer.sentinels(count)
    assert len(set(sentinels)) == count
    assert sentinels[: min(named, count)] == ids[:count]
    not_text = {*ids, *range(tokenizer.vocabulary, tokenizer.vocabulary + max(100, count))}
    assert not_text.issuperset(sentinels)
    assert tokenizer.sentinels(0) == []
    assert tokenizer.sentinels(max(100, count // 2)) == sentinels[: max(100, count // 2)]


def test_sentinels_are_those_of_t5_and_mt5():
    t5 = NamedTokens(32_000, {})
    assert t5.sentinels(100) == list(range(32_099, 31_999, -1))
    assert t5.sentinels(102)[99:] == [32_000, 32_100, 32_101]
    mt5 = {f"\u2581<extra_id_{number}>": 250_099 - number for number in range(100)}
    assert NamedTokens(250_100, mt5).sentinels(102)[98:] == [250_001, 250_000, 250_100, 250_101]


@pytest.mark.parametrize(("length", "spans"), [(1809, 100), (1810, 101), (4096, 227)])
def test_every_span_has_a_row_of_the_embedding(length: int, spans: int):
    rows = 1000
    changes = [*TINY_T5, f"data.sequence_length={length}", f"model.vocabulary={rows}"]

    def check(tokens: int) -> None:
        check_data(decode(tiny_values(*changes, f"data.vocabulary={tokens}")))

    check(rows - spans)
    with pytest.raises(ConfigError, match=rf"{spans} sentinels(.|\n)*={rows - spans}$"):
        check(rows - spans + 1)
    assert span_lengths(length).spans == spans
    given = NamedTokens(rows - spans + 1, {})
    values = tiny_values(*changes, "data.tokenizer=t.model")
    with pytest.raises(ConfigError, match=rf"{spans} sentinels(.|\n)*={rows + 1}, or"):
        check_vocabulary(decode(values), given)


@pytest.mark.parametrize("spare", [0, 5])
def test_a_batch_is_laid_out_for_teacher_forcing(spare: int):
    tokens = 100
    lengths = corrupted(tokens)
    maker = corruption(tokens, inputs=lengths.inputs + spare)
    rows = [draw_text(tokens, seed) for seed in range(3)]
    batch = maker.batch(rows, [7, 8, 9])
    assert batch.encoder_tokens.shape == (3, lengths.inputs + spare)
    assert batch.labels.shape == batch.decoder_tokens.shape == batch.loss_mask.shape
    assert batch.labels.shape[1] % DECODER_MULTIPLE == 0
    assert batch.labels.shape[1] - lengths.targets < DECODER_MULTIPLE
    assert torch.equal(batch.decoder_tokens[:, 0], torch.full((3,), START))
    inside = slice(0, lengths.targets)
    assert torch.equal(batch.decoder_tokens[:, inside][:, 1:], batch.labels[:, inside][:, :-1])
    assert batch.loss_mask[:, inside].all()
    assert not batch.loss_mask[:, lengths.targets :].any()
    for row in range(3):
        inputs, targets = maker.corrupt(rows[row], 7 + row)
        assert batch.encoder_tokens[row, : len(inputs)].tolist() == inputs.tolist()
        assert batch.labels[row, inside].tolist() == targets.tolist()
    if spare:
        assert batch.encoder_mask is not None
        assert batch.encoder_mask.sum(dim=1).tolist() == [lengths.inputs] * 3
        assert not batch.encoder_tokens[:, lengths.inputs :].any()
    else:
        assert batch.encoder_mask is None
