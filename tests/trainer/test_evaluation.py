"""A validation reads each sample once, and its value depends on the samples alone."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.data.batch import LossSums
from frontier_llm.data.corpora import ValidationWindows
from frontier_llm.data.document_rows import Row, document_batch
from frontier_llm.data.loader import BatchLoader, causal_batch
from frontier_llm.launch.world import World
from frontier_llm.trainer.evaluate import TextLoss, Validation, bits_per_byte
from tests.batches import _documents, _tokens
from tests.covering import covering
from tests.ranks import run_ranks
from tests.trainer.evaluation import evaluation, fake_corpora
from tests.trainer.rig import Rig, make_rig
from tests.values import tiny_values

BYTES = (2.0, 3.5)


class Split:
    """The validation samples of a corpus; they count how often each is read."""

    def __init__(self, rig: Rig, first: int, count: int) -> None:
        self._config, self._range = rig.config, range(first, first + count)
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Any:
        assert 0 <= index < len(self)
        self.reads[index] += 1
        number = self._range[index]
        if self._config.data.documents == "separate":
            return _documents(self._config, number)
        return _tokens(self._config, number, self._config.data.sequence_length + 1).numpy()


def splits(rig: Rig, counts: Sequence[int]) -> list[Split]:
    return [Split(rig, 100 * number, count) for number, count in enumerate(counts)]


def evaluated(world: World, values: dict[str, Any], counts: Sequence[int]) -> Validation:
    rig = make_rig(world, values)
    data, at = rig.config.data, rig.groups.coordinates
    wanted = rig.config.trainer.evaluate_batches * data.global_batch
    samples: Any = splits(rig, counts)
    windows = ValidationWindows(samples, [1 / len(counts)] * len(counts), wanted)
    number = f"{len(windows)} of {sum(counts)}" if len(windows) < sum(counts) else "all "
    assert str(windows).startswith(number)
    make = partial(document_batch, separate=True) if data.documents == "separate" else causal_batch
    loader = BatchLoader(
        windows, data.global_batch, data.micro_batch, at.data, rig.groups.grid.data, make,
        ends=True,
    )  # fmt: skip
    found = evaluation(rig, loader, fake_corpora(*BYTES[: len(counts)]), windows)
    results = [found.run() for _ in range(2)]
    loader.close()
    assert results[0] == results[1], "the same samples each time"
    return results[0]


def by_hand(world: World, values: dict[str, Any], counts: Sequence[int]) -> Validation:
    """Evaluate the samples one by one, with torch's cross entropy."""
    rig = make_rig(world, values)
    (module,) = rig.model.chunks
    module.eval()
    loss = nats_of_text = size_of_text = 0.0
    for split, size in zip(splits(rig, counts), BYTES, strict=False):
        means, nats, tokens, text, number = [], 0.0, 0, 0.0, 0
        for index in range(len(split)):
            row = split[index]
            make = partial(document_batch, separate=True) if isinstance(row, Row) else causal_batch
            batch = make([row], [index])
            with torch.no_grad():
                logits = module(**batch.inputs())[0, :, : rig.config.model.vocabulary].double()
            losses = torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="none")
            mask = batch.loss_mask
            kept = torch.ones(len(losses)) > 0 if mask is None else mask[0] > 0
            means.append(losses[kept].mean().item())
            nats, tokens = nats + losses[kept].sum().item(), tokens + int(kept.sum())
            words = kept & (batch.labels[0] != 0)  # 0 ends a document
            text, number = text + losses[words].sum().item(), number + int(words.sum())
        share = 1 / len(counts)
        by_samples = rig.config.data.loss_mean == "samples"
        loss += share * (np.mean(means) if by_samples else nats / tokens)
        nats_of_text, size_of_text = (
            nats_of_text + share * text / number,
            size_of_text + share * size,
        )
    return Validation(loss, nats_of_text / size_of_text / math.log(2), sum(counts))


SEPARATE, TOKENS = "data.documents=separate", "data.loss_mean=tokens"
LAYOUTS = {
    "alone": (1, ["data.global_batch=4"]),
    "large_batch": (1, ["data.global_batch=64", "data.micro_batch=4"]),
    "data2": (2, ["data.global_batch=8", "data.micro_batch=2"]),
    "interleaved": (2, ["parallel.pipeline=2", "parallel.chunks=2", "data.global_batch=6"]),
    "tensor2_pipeline2_data2": (
        8, ["parallel.tensor=2", "parallel.pipeline=2", "data.global_batch=12"],
    ),
    "zero3": (2, ["sharding=zero3", "data.global_batch=8"]),
}  # fmt: skip
CASES = [
    ("alone", (1,), (SEPARATE,)),
    ("data2", (1,), (SEPARATE,)),
    ("large_batch", (7, 2), (SEPARATE,)),
    ("interleaved", (7, 2), (SEPARATE, TOKENS)),
    ("tensor2_pipeline2_data2", (7, 2), (SEPARATE,)),
    ("tensor2_pipeline2_data2", (5,), (TOKENS,)),
    ("zero3", (7, 2), ()),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES, [CASES[1], CASES[5], CASES[6]]), ids=str)
def test_the_value_is_that_of_all_samples_once(case: Any) -> None:
    layout, counts, overrides = case
    size, of_layout = LAYOUTS[layout]
    more = "trainer.evaluate_batches=9"
    wanted = run_ranks(by_hand, 1, tiny_values(*overrides), counts)[0]
    for found in run_ranks(evaluated, size, tiny_values(*overrides, *of_layout, more), counts):
        assert found.samples == wanted.samples == sum(counts)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert found.bits_per_byte == pytest.approx(wanted.bits_per_byte, rel=1e-5)


COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(COUNTS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_replicas_read_each_sample_once(
    counts: list[int], batches: int, replicas: int, micro_batch: int, micro_batches: int
) -> None:
    """And have equal numbers of equal micro-batches, so that no stage waits for another."""
    rows: Any = [[np.full(3, 100 * c + k) for k in range(n)] for c, n in enumerate(counts)]
    step = replicas * micro_batch * micro_batches
    windows = ValidationWindows(rows, [1 / len(counts)] * len(counts), batches * step)
    assert len(windows) <= max(batches * step + len(counts), len(counts))
    read: Counter[int] = Counter()
    shapes = []
    for rank in range(replicas):
        loader = BatchLoader(windows, step, micro_batch, rank, replicas, ends=True)
        found = [b for first in range(0, len(windows), step) for b in loader.micro_batches(first)]
        loader.close()
        shapes.append([batch.tokens.shape for batch in found])
        for batch in found:
            mask = torch.ones(batch.tokens.shape) if batch.loss_mask is None else batch.loss_mask
            kept = mask.amin(1) > 0
            assert torch.equal(kept, mask.amax(1) > 0), "a copy predicts nothing at all"
            read.update(batch.tokens[kept, 0].tolist())
    assert all(shape == shapes[0] for shape in shapes)
    assert read == Counter(int(windows[index][0]) for index in range(len(windows)))
    assert max(read.values()) == 1
    needed = -(-len(windows) // (replicas * micro_batch))
    assert len(shapes[0]) == needed, "no more micro-batches than are needed"


@given(st.floats(0.1, 9), st.floats(1, 8), st.integers(1, 1000), st.integers(0, 50))
def test_bits_per_byte_leave_out_what_is_no_text(
    nats: float, size: float, tokens: int, ends: int
) -> None:
    sums = LossSums(1, nats, tokens * nats + ends, tokens + ends, tokens * nats, tokens)
    bits = bits_per_byte([TextLoss(sums, size)])
    assert bits == pytest.approx(tokens * nats / math.log(2) / (tokens * size))
    assert bits_per_byte([TextLoss(sums, size, 0.3), TextLoss(sums, size, 0.7)]) == (
        pytest.approx(bits)
    )


def test_without_a_token_of_text_there_are_no_bits_per_byte() -> None:
    assert bits_per_byte([TextLoss(LossSums(1, 2.0, 2.0, 1, 0.0, 0), 3.0)]) is None
    assert bits_per_byte([TextLoss(LossSums(1, 2.0, 2.0, 1, 2.0, 1), 0.0)]) is None
