import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import decode
from frontier_llm.config.denoisers import T5, Denoiser, divided, sample_parts, sentinels_of
from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.config.reading import check_data
from frontier_llm.data.denoising import PADDING, Denoising
from frontier_llm.data.permutation import make_key
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import check_vocabulary, mode_tokens
from frontier_llm.errors import ConfigError
from tests.covering import covering
from tests.data.text_stream import restore
from tests.properties import examples
from tests.values import TINY_T5, tiny_values

EOS, SENTINELS = 1, list(range(999, 899, -1))
UL2 = decode(tiny_values(*TINY_T5, "data=stdlib_ul2")).data.denoisers
MODES = {"NLU": 1000, "NLG": 1001, "S2S": 1002}


def corruption(text: int, key: int = 5, inputs: int | None = None) -> Denoising:
    return Denoising(T5, text, inputs or divided(text).inputs, SENTINELS, {}, EOS, key)


def draw_text(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 800, tokens)


@examples(100)
@given(st.integers(14, 1300), st.integers(0, 2**50), st.integers(0, 2**64 - 1))
def test_filling_the_sentinels_restores_the_text(tokens: int, index: int, key: int):
    text = draw_text(tokens, index % 7)
    inputs, targets = corruption(tokens, key).divide(text, index)
    lengths = divided(tokens)
    assert (len(inputs), len(targets)) == (lengths.inputs, lengths.targets)
    assert inputs[-1] == targets[-1] == EOS
    sentinels = SENTINELS[: lengths.spans]
    assert [t for t in inputs if t >= 900] == [t for t in targets if t >= 900] == sentinels
    assert restore(inputs.tolist(), targets.tolist(), SENTINELS, EOS) == text.tolist()


def test_lengths_are_those_of_t5():
    assert sample_parts(512).text == 568
    assert sample_parts(512).targets == 114
    found = sample_parts(1024)
    assert (found.text, found.inputs, found.targets) == (1137, 1024, 229)


def test_spans_depend_only_on_key_and_index():
    text = draw_text(568)
    first = corruption(568).divide(text, 3)
    assert all(map(np.array_equal, first, corruption(568).divide(text, 3)))
    for other in (corruption(568).divide(text, 4), corruption(568, key=6).divide(text, 3)):
        assert not np.array_equal(first[0], other[0])


def test_all_tokens_are_equally_likely_removed_and_spans_are_short():
    tokens, runs = 568, 400
    text = np.arange(10_000, 10_000 + tokens)
    taken, spans = np.zeros(tokens), []
    for index in range(runs):
        _, targets = corruption(tokens).divide(text, index)
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
    assert count >= sample_parts(inputs).spans
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
    assert sample_parts(length).spans == spans
    given = NamedTokens(rows - spans + 1, {})
    values = tiny_values(*changes, "data.tokenizer=t.model")
    with pytest.raises(ConfigError, match=rf"{spans} sentinels(.|\n)*={rows + 1}, or"):
        check_vocabulary(decode(values), given)


@pytest.mark.parametrize("spare", [0, 5])
def test_a_batch_is_laid_out_for_teacher_forcing(spare: int):
    tokens = 100
    lengths = divided(tokens)
    maker = corruption(tokens, inputs=lengths.inputs + spare)
    rows = [draw_text(tokens, seed) for seed in range(3)]
    batch = maker.batch(rows, [7, 8, 9])
    assert batch.encoder_tokens.shape == (3, lengths.inputs + spare)
    assert batch.labels.shape == batch.tokens.shape == batch.loss_mask.shape
    assert batch.labels.shape[1] % DECODER_MULTIPLE == 0
    assert batch.labels.shape[1] - lengths.targets < DECODER_MULTIPLE
    assert torch.equal(batch.tokens[:, 0], torch.full((3,), PADDING))
    inside = slice(0, lengths.targets)
    assert torch.equal(batch.tokens[:, inside][:, 1:], batch.labels[:, inside][:, :-1])
    assert batch.loss_mask[:, inside].all()
    assert not batch.loss_mask[:, lengths.targets :].any()
    for row in range(3):
        inputs, targets = maker.divide(rows[row], 7 + row)
        assert batch.encoder_tokens[row, : len(inputs)].tolist() == inputs.tolist()
        assert batch.labels[row, inside].tolist() == targets.tolist()
    if spare:
        assert batch.encoder_mask is not None
        assert batch.encoder_mask.sum(dim=1).tolist() == [lengths.inputs] * 3
        assert not batch.encoder_tokens[:, lengths.inputs :].any()
    else:
        assert batch.encoder_mask is None


# The reference: the same draws, and then token by token in plain Python


def numbers(count: int, key: int) -> list[int]:
    """Return the numbers of splitmix64 (https://prng.di.unimi.it/splitmix64.c)."""
    found = []
    for index in range(count):
        value = (index * 0x9E3779B97F4A7C15 + key) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        found.append(value ^ value >> 31)
    return found


def pieces(total: int, count: int, key: int) -> list[int]:
    """Divide a length at the places with the smallest numbers."""
    drawn = numbers(total - 1, key)
    places = sorted(range(total - 1), key=lambda place: drawn[place])[: count - 1]
    borders = [0, *sorted(place + 1 for place in places), total]
    return [after - before for before, after in itertools.pairwise(borders)]


def reference(
    text: list[int], denoiser: Denoiser, sentinels: list[int], key: int
) -> tuple[list[int], list[int]]:
    """Divide a text as the papers say."""
    inputs = [] if denoiser.mode is None else [MODES[denoiser.mode]]
    targets: list[int] = []
    removed = max(1, round(len(text) * denoiser.rate))
    if denoiser.span is None:
        for place, token in enumerate(text):
            (targets if place >= len(text) - removed else inputs).append(token)
        return [*inputs, EOS], [*targets, EOS]
    spans = max(1, round(removed / denoiser.span))
    kept = pieces(len(text) - removed, spans, make_key(key, "kept"))
    taken = pieces(removed, spans, make_key(key, "taken"))
    rest = iter(text)
    for sentinel, stays, leaves in zip(sentinels, kept, taken, strict=False):
        inputs += [next(rest) for _ in range(stays)] + [sentinel]
        targets += [sentinel] + [next(rest) for _ in range(leaves)]
    assert next(rest, None) is None
    return [*inputs, EOS], [*targets, EOS]


def mixture(denoisers: tuple[Denoiser, ...], inputs: int, key: int = 5) -> tuple[Denoising, int]:
    """Return a mixture and the length of its texts."""
    parts = sample_parts(inputs, denoisers)
    sentinels = list(range(5000, 5000 - max(1, parts.spans), -1))
    return Denoising(denoisers, parts.text, inputs, sentinels, MODES, EOS, key), parts.text


def compare(denoisers: tuple[Denoiser, ...], inputs: int, samples: int) -> None:
    """Compare samples with the reference."""
    made, length = mixture(denoisers, inputs)
    sentinels = list(range(5000, 0, -1))
    for index in range(samples):
        text = draw_text(length, index)
        expected = reference(
            text.tolist(), denoisers[made.denoiser(index)], sentinels, make_key(5, index)
        )
        assert [part.tolist() for part in made.divide(text, index)] == [*expected]
        assert len(expected[0]) <= inputs


@pytest.mark.parametrize("samples", covering([100, 10_000], [10_000]))
@pytest.mark.parametrize("number", range(len(UL2)))
def test_a_denoiser_divides_as_the_papers_say(number: int, samples: int) -> None:
    compare(UL2[number : number + 1], 256, samples)


def test_a_mixture_draws_each_denoiser_as_often_as_its_weight_says() -> None:
    weights, samples = (1.0, 0.5, 2.0, 1.0, 3.0, 0.25, 4.0), 10_000
    pairs = zip(UL2, weights, strict=True)
    denoisers = tuple(d.model_copy(update={"weight": weight}) for d, weight in pairs)
    made, _ = mixture(denoisers, 256)
    drawn = Counter(made.denoiser(index) for index in range(samples))
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = math.sqrt(samples * share * (1 - share))
        assert abs(drawn[number] - samples * share) < 3 * deviation
    compare(denoisers, 256, 100)


@pytest.mark.parametrize("denoiser", UL2, ids=lambda d: f"{d.rate}-{d.span}")
def test_rates_and_spans_are_those_of_the_setting(denoiser: Denoiser) -> None:
    parts = sample_parts(65_536, (denoiser,))
    removed = parts.targets - parts.spans - 1
    assert removed / parts.text == pytest.approx(denoiser.rate, rel=1e-3)
    if denoiser.span is not None:
        assert removed / parts.spans == pytest.approx(denoiser.span, rel=0.01)


DENOISERS = st.lists(
    st.builds(
        Denoiser,
        rate=st.floats(0.01, 0.95),
        span=st.none() | st.floats(1, 80),
        mode=st.sampled_from([None, *MODES]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@examples(100)
@given(DENOISERS, st.integers(8, 3000), st.integers(0, 2**40))
def test_samples_of_any_mixture_fit_and_use_reserved_tokens(
    denoisers: tuple[Denoiser, ...], inputs: int, index: int
) -> None:
    parts = sample_parts(inputs, denoisers)
    assert parts.text > 0
    assert max(divided(parts.text + 1, denoiser).inputs for denoiser in denoisers) > inputs
    sentinels = NamedTokens(1000, {}).sentinels(sentinels_of(inputs, denoisers))
    made = Denoising(denoisers, parts.text, inputs, sentinels, MODES, EOS, index)
    text = draw_text(parts.text, index % 9)
    batch = made.batch([text] * 3, [index, index + 1, index + 2])
    assert 0 <= batch.labels.shape[1] - parts.targets < DECODER_MULTIPLE
    for row in range(3):
        denoiser = denoisers[made.denoiser(index + row)]
        mask = slice(None) if batch.encoder_mask is None else batch.encoder_mask[row]
        read = batch.encoder_tokens[row][mask].tolist()
        predicted = batch.labels[row][batch.loss_mask[row] > 0].tolist()
        shifted = [PADDING, *predicted[:-1]]
        padding = [PADDING] * (batch.labels.shape[1] - len(predicted))
        assert batch.tokens[row].tolist() == shifted + padding
        if denoiser.mode is not None:
            assert read.pop(0) == MODES[denoiser.mode]
        if denoiser.span is None:
            assert [*read[:-1], *predicted[:-1]] == text.tolist()
        else:
            assert restore(read, predicted, sentinels, EOS) == text.tolist()


def test_modes_are_the_last_rows_and_need_them() -> None:
    keys = [*TINY_T5, "data=stdlib_ul2", "model.vocabulary=1000"]
    config = decode(tiny_values(*keys, "data.vocabulary=800"))
    assert mode_tokens(config) == {"NLU": 999, "NLG": 998, "S2S": 997}
    check_data(decode(tiny_values(*keys, "data.vocabulary=897")))
    with pytest.raises(ConfigError, match=r"100 sentinels.* and 3 modes(.|\n)*=1001 or .*=897"):
        check_data(decode(tiny_values(*keys, "data.vocabulary=898")))
    given = decode(tiny_values(*keys, "data.tokenizer=t.model"))
    check_vocabulary(given, NamedTokens(897, {}))
    with pytest.raises(ConfigError, match=r"and 3 modes(.|\n)*model.vocabulary=1001"):
        check_vocabulary(given, NamedTokens(898, {}))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_length_without_room_is_refused(length: int) -> None:
    keys = [*TINY_T5, "data.vocabulary=28", f"data.sequence_length={length}"]
    config = decode(tiny_values(*keys))
    if length == 3:
        check_data(config)
        return
    with pytest.raises(ConfigError, match=r"data\.sequence_length"):
        check_data(config)
