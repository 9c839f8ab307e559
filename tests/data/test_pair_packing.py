"""Texts of an encoder-decoder are packed under the limits of both sides, each once."""

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import decode
from frontier_llm.config.data import DataConfig
from frontier_llm.config.denoisers import divided
from frontier_llm.config.reading import check_data
from frontier_llm.data.corpora import Corpora, open_data
from frontier_llm.data.document_rows import Row
from frontier_llm.data.packing import open_packing, pack, packing_folder, padding_shares
from frontier_llm.data.pair_packing import Pairs
from frontier_llm.data.read_share import pair_share
from frontier_llm.data.run_loader import describe_samples, make_loader, make_windows
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.flops import forward_flops
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.saving.changes import changes, refuse
from tests.data.conftest import write_jsonl
from tests.data.test_run_loader import run_config
from tests.data.text_stream import restore
from tests.values import TINY_T5, tiny_values

PACKED = ("data.documents=separate", "data.packing=best_fit")


def data_of(*overrides: str) -> DataConfig:
    return decode(tiny_values(*TINY_T5, "data=stdlib_ul2", *PACKED, *overrides)).data


def pairs_of(*overrides: str) -> Pairs:
    pairs = Pairs.of(data_of(*overrides))
    assert pairs is not None
    return pairs


def drawn_documents(count: int) -> np.ndarray:
    """Log-normal lengths with a median of 404 tokens and a mean of 830."""
    drawn = np.random.default_rng(0).lognormal(np.log(404), 1.2, count)
    return np.maximum(drawn.astype(np.int64), 1)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.sampled_from([None, 16, 40]))
def test_each_token_is_in_one_sample_within_both_limits(
    documents: list[int], decoder: int | None
) -> None:
    pairs = pairs_of("data.sequence_length=48", f"data.decoder_length={decoder or 'null'}")
    packed = pack(np.array(documents), 48, pairs)
    assert packed.pairs is not None
    ends = np.cumsum(documents)
    pieces = sorted(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    read = [token for start, length in pieces for token in range(start, start + length)]
    # all but the tokens that end documents, and texts of one token
    begins = ends - documents
    single = [int(a) for a, b in zip(begins, ends, strict=True) if b - a == 2]
    assert read == sorted(set(range(ends[-1])) - {int(end) - 1 for end in ends} - set(single))
    assert packed.lengths.max(initial=0) <= pairs.text
    for first, stop in itertools.pairwise(packed.first_pieces.tolist()):
        filled = packed.pairs[first:stop, 1:].sum(0)
        assert filled[0] <= 48
        assert filled[1] <= pairs.targets
    for length, (number, *sizes) in zip(packed.lengths, packed.pairs.tolist(), strict=True):
        parts = divided(int(length), pairs.denoisers[number])
        assert sizes == [parts.inputs, parts.targets]


def plainly(sizes: list[tuple[int, int]], limits: tuple[int, int], weight: int) -> list[list[int]]:
    """The texts of each sample, by the definition in the module."""
    needed = [sum(size[side] / limits[side] for size in sizes) for side in (0, 1)]
    scarce = [need / max(needed) for need in needed]
    waiting = sorted(
        range(len(sizes)), key=lambda i: -(sizes[i][0] / limits[0] + sizes[i][1] / limits[1])
    )
    samples = list[list[int]]()
    while waiting:
        samples.append([waiting.pop(0)])
        while True:
            best, chosen = 9.0, -1
            for text in waiting:
                of_sample = [sizes[i] for i in (*samples[-1], text)]
                left = [limits[side] - sum(size[side] for size in of_sample) for side in (0, 1)]
                one, other = (left[side] * (scarce[side] / limits[side]) for side in (0, 1))
                if min(left) >= 0 and (worth := one + other + weight * abs(one - other)) < best:
                    best, chosen = worth, text
            if chosen < 0:
                break
            waiting.remove(chosen)
            samples[-1].append(chosen)
    return samples


@given(st.lists(st.tuples(st.integers(3, 40), st.integers(2, 24)), min_size=1, max_size=50))
def test_samples_are_filled_equally_on_both_sides(sizes: list[tuple[int, int]]) -> None:
    pairs = replace(pairs_of(), inputs=40, targets=24)
    sample_of = pairs.place(np.array(sizes, np.int32))
    found = [np.flatnonzero(sample_of == k).tolist() for k in range(sample_of.max() + 1)]
    wanted = min((plainly(sizes, (40, 24), weight) for weight in (1, 3)), key=len)
    assert found == [sorted(sample) for sample in wanted]


def test_blocks_of_texts_have_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontier_llm.data.pair_packing.BLOCK", 4)
    pairs = replace(pairs_of(), inputs=100, targets=100)
    shown: list[float] = []
    sample_of = pairs.place(np.full((9, 2), 30, np.int32), shown.append)
    assert sample_of.tolist() == [0, 0, 0, 1, 2, 2, 2, 3, 4]
    assert shown == [4 / 9, 8 / 9, 1]


@pytest.mark.parametrize(
    ("decoder", "encoder_padding", "decoder_padding"),
    [("null", 0.01, 0.36), ("4096", 0.01, 0.53), ("2304", 0.03, 0.16), ("1984", 0.05, 0.04)],
)
def test_samples_of_the_mixture_of_ul2_are_full(
    decoder: str, encoder_padding: float, decoder_padding: float
) -> None:
    pairs = pairs_of("data.sequence_length=4096", f"data.decoder_length={decoder}")
    shares = padding_shares([pack(drawn_documents(8000), 4096, pairs)], pairs)
    assert shares[0] < encoder_padding
    assert shares[1] < decoder_padding


def test_denoisers_are_drawn_by_their_weights() -> None:
    pairs = pairs_of()
    weights = [3.0, 1.0, 1.0, 0.5, 1.0, 1.0, 2.5]
    denoisers = tuple(
        denoiser.model_copy(update={"weight": weight})
        for denoiser, weight in zip(pairs.denoisers, weights, strict=True)
    )
    drawn = replace(pairs, denoisers=denoisers).divide(np.full(20000, 12))[:, 0]
    shares = np.array(weights) / sum(weights)
    errors = np.bincount(drawn, minlength=7) - 20000 * shares
    assert (np.abs(errors) < 3 * np.sqrt(20000 * shares * (1 - shares))).all()


def test_the_samples_are_kept_per_denoisers_and_limits(tmp_path: Path) -> None:
    documents, prefix = drawn_documents(60), tmp_path / "train"
    variants = ("data.decoder_length=null", "data.decoder_length=512", "data=stdlib_spans")
    folders = set()
    for variant in variants:
        pairs = pairs_of("data.sequence_length=1024", variant)
        first, again = (open_packing(prefix, documents, 1024, pairs) for _ in range(2))
        assert np.array_equal(first.pairs, again.pairs)  # type: ignore[arg-type]
        folders.add(packing_folder(prefix, 1024, pairs))
    assert len(folders) == len(variants)
    assert all(folder.is_dir() for folder in folders)


def test_the_share_of_read_pairs_is_that_of_a_mask() -> None:
    pairs = pairs_of("data.sequence_length=64")
    packed = pack(np.array([30, 12, 9, 50, 41]), 64, pairs)
    assert packed.pairs is not None
    counts = []
    for first, stop in itertools.pairwise(packed.first_pieces.tolist()):
        sides = []
        for side, limit in ((1, pairs.inputs), (2, pairs.targets)):
            ids = np.repeat(np.arange(stop - first), packed.pairs[first:stop, side])
            sides.append(np.pad(ids + 1, (0, limit - len(ids))))
        for one, other in ((0, 0), (1, 1), (1, 0)):
            same = (sides[one][:, None] == sides[other]) & (sides[one][:, None] > 0)
            counts.append((same.sum(), same.size))
    read, whole = np.sum(counts, axis=0)
    assert pair_share(packed, pairs) == pytest.approx(read / whole)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Corpora]:
    folder = tmp_path_factory.mktemp("pairs")
    text = write_jsonl(folder / "text.jsonl", 400)
    changes = {
        "kind": "text", "path": str(text), "directory": str(folder), "vocabulary": 300,
        "sequence_length": 96, "decoder_length": 56, "name": "text",
    }  # fmt: skip
    data = data_of("data.sequence_length=96").model_copy(update=changes)
    return data, open_data(data)


def settings_of(data: DataConfig) -> Any:
    return run_config(data).changed("model", vocabulary=512)


def test_texts_of_a_batch_are_restored(opened: tuple[DataConfig, Corpora]) -> None:
    data, corpora = opened
    windows = make_windows(settings_of(data), corpora, train=True)
    with closing(make_loader(settings_of(data), corpora, 0, 1, train=True)) as loader:
        batches = loader.micro_batches(16)
    sentinels, eod = corpora.tokenizer.sentinels(data.sentinels), corpora.tokenizer.eod
    restored = 0
    for number, batch in enumerate(batches):
        assert batch.encoder_tokens is not None
        row = windows[16 + number]
        assert isinstance(row, Row)
        assert batch.encoder_mask is None
        assert batch.lengths.encoder == 96
        assert batch.lengths.decoder == 56
        borders = [
            batch.encoder_cumulative_lengths[0].tolist(), batch.cumulative_lengths[0].tolist()
        ]  # fmt: skip
        assert borders[0][-1] == 96
        assert borders[1][-1] == 56
        assert len(set(borders[1])) == 1 + len(row.denoisers), "padding is in the last text"
        texts = np.split(row.tokens, np.cumsum(row.lengths)[:-1])
        for place, (text, kind) in enumerate(zip(texts, row.denoisers, strict=True)):
            inputs = batch.encoder_tokens[0, borders[0][place] : borders[0][place + 1]].tolist()
            at = slice(borders[1][place], borders[1][place + 1])
            targets = batch.labels[0, at][batch.loss_mask[0, at] > 0].tolist()
            read = batch.tokens[0, at].tolist()[: len(targets)]
            assert read == [0, *targets[:-1]], "each text begins with the start token"
            assert inputs[-1] == targets[-1] == eod
            if data.denoisers[kind].span is None:
                assert inputs[1:-1] + targets[:-1] == text.tolist()
            else:
                assert restore(inputs[1:], targets, sentinels, eod) == text.tolist()
                restored += 1
    assert restored > 5


def test_samples_do_not_depend_on_ranks_or_start(opened: tuple[DataConfig, Corpora]) -> None:
    data, corpora = opened
    settings, found = settings_of(data), []
    for ranks in (1, 2, 4):
        digest = 0
        for rank in range(ranks):
            with closing(make_loader(settings, corpora, rank, ranks, train=True)) as loader:
                if ranks == 2:  # another start reads other steps before
                    loader.read_step(0)
                digest += loader.read_step(24).digest
        found.append(digest)
    assert len(set(found)) == 1
    with closing(make_loader(settings, corpora, 0, 1, train=True)) as loader:
        assert loader.read_step(16).digest != found[0]


def test_spans_of_a_text_differ_between_epochs(opened: tuple[DataConfig, Corpora]) -> None:
    data, corpora = opened
    settings = settings_of(data)
    windows: Any = make_windows(settings, corpora, train=True)
    count, target = len(windows), windows.window(0)
    again = next(i for i in range(count, 2 * count) if windows.window(i) == target)
    with closing(make_loader(settings, corpora, 0, 1, train=True)) as loader:
        make: Any = loader._make_batch
        first, second = (make([windows[i]], [i]) for i in (0, again))
    assert torch.equal(first.encoder_cumulative_lengths, second.encoder_cumulative_lengths)
    assert not torch.equal(first.encoder_tokens, second.encoder_tokens)


def test_the_padding_of_both_sides_is_told(opened: tuple[DataConfig, Corpora]) -> None:
    data, corpora = opened
    windows: Any = make_windows(settings_of(data), corpora, train=True)
    pairs = Pairs.of(data)
    shares = padding_shares([windows.packing], pairs)
    text = describe_samples(settings_of(data), corpora)
    assert text.endswith(f"{shares[0]:.2%} padding in the encoder, {shares[1]:.2%} in the decoder")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (PACKED[:1], "data.documents"),
        (PACKED[1:], "data.packing"),
        ((*PACKED, "data.sequence_length=2"), "data.sequence_length"),
        ((*PACKED, "data.decoder_length=8", "data.denoisers=[{rate: 0.9, span: 1}]"), None),
        (PACKED, None),
    ],
)
def test_texts_are_packed_only_if_they_are_separate(
    overrides: tuple[str, ...], key: str | None
) -> None:
    config = decode(tiny_values(*TINY_T5, "model.vocabulary=512", *overrides))
    if key is None:
        return check_data(config)
    with pytest.raises(ConfigError) as caught:
        check_data(config)
    assert caught.value.key == key


def test_the_decoder_limits_the_length_of_the_text() -> None:
    pairs = pairs_of("data.sequence_length=512", "data.decoder_length=100")
    assert pairs.targets == 104, "a multiple of 8"
    parts = [[divided(pairs.text + k, denoiser) for denoiser in pairs.denoisers] for k in (0, 1)]
    assert max(p.targets for p in parts[0]) <= 100
    assert max(p.targets for p in parts[1]) > 100


def test_a_resumed_run_keeps_what_decides_its_samples() -> None:
    def refused(*change: str) -> str | None:
        before, now = (
            decode(tiny_values(*TINY_T5, *PACKED, *more, "run.allow_changes=[data]"))
            for more in ((), change)
        )
        found = changes(before.model_dump(mode="json"), now.model_dump(mode="json"))
        try:
            refuse(found, now)
        except ConfigError as error:
            return error.key
        return None

    assert refused("data.decoder_length=16") == "data.decoder_length"
    assert refused("data.denoisers=[{rate: 0.2}]") == "data.denoisers"
    assert refused("data.sequence_length=32") == "data.sequence_length"
    assert refused("data.loss_mean=tokens") is None


def test_flops_count_the_pairs_that_are_read() -> None:
    config = decode(tiny_values(*TINY_T5, *PACKED, "data.read_share=0.25"))
    lengths = sample_lengths(config.model, config.data)
    share = config.data.pairs_read
    assert share == 0.25
    whole, part = (forward_flops(config.model, lengths, of) for of in (1.0, share))
    assert part.attention == 0.25 * whole.attention, "cross attention, too"
    assert part.total - part.attention == whole.total - whole.attention
