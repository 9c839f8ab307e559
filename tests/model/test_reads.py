"""Bounds, documents, padding and capped scores against the matrix of all scores."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from frontier_llm.geometry.state_memory import CPU_QUERY_BLOCK
from frontier_llm.model import flex
from frontier_llm.model.attention import SdpaAttention, attend
from frontier_llm.model.flex import FlexKernel
from frontier_llm.model.reads import Documents, Reads, Scores
from tests.covering import one_in
from tests.model.test_attention import LargestTensor, random_qkv

TOKENS = 2 * CPU_QUERY_BLOCK + 9
HEADS = 4
BORDERS = [[0, 1, 5, CPU_QUERY_BLOCK + 7, TOKENS], [0, 2 * CPU_QUERY_BLOCK, TOKENS, TOKENS, TOKENS]]
OTHERS = [[0, 7, 8, 21, 40], [0, 30, 40, 40, 40]]
"""Borders of as many documents of 40 tokens."""
ENDS = [[0, TOKENS, TOKENS], [0, CPU_QUERY_BLOCK + 3, TOKENS]]
"""Of samples, the second of which is padded."""


def documents(borders: list[list[int]]) -> Documents:
    return Documents(torch.tensor(borders, dtype=torch.int32), borders[0][-1])


def separate(borders: list[list[int]], **bounds: int) -> Reads:
    own = documents(borders)
    return Reads(**bounds, queries=own, keys=own)


CASES = {
    "window": (Scores(), Reads(20, 1)),
    "window_of_one": (Scores(), Reads(1, 1)),
    "window_of_a_block": (Scores(), Reads(CPU_QUERY_BLOCK, 1)),
    "window_over_blocks": (Scores(), Reads(CPU_QUERY_BLOCK + 2, 1)),
    "window_over_all": (Scores(), Reads(TOKENS, 1)),
    "all": (Scores(), Reads()),
    "both_sides": (Scores(), Reads(20, 33)),
    "after": (Scores(), Reads(None, CPU_QUERY_BLOCK + 2)),
    "window_on_both_sides_and_padding": (Scores(), separate(ENDS, before=20, after=20)),
    "padding": (Scores(), Reads(keys=documents(ENDS))),
    "capped_with_padding": (Scores(cap=0.7), Reads(keys=documents(ENDS))),
    "cap": (Scores(cap=0.7), Reads(after=1)),
    "documents": (Scores(), separate(BORDERS, after=1)),
    "documents_read_whole": (Scores(), separate(BORDERS)),
    "each": (Scores(scale=1.0, cap=0.7), separate(BORDERS, before=20, after=1)),
}
OF_OTHERS = {
    "other_tokens": (Scores(), Reads()),
    "other_documents": (Scores(), Reads(queries=documents(OTHERS), keys=documents(BORDERS))),
    "capped_other_documents": (
        Scores(cap=0.7), Reads(queries=documents(OTHERS), keys=documents(BORDERS)),
    ),
    "other_padding": (Scores(), Reads(keys=documents(ENDS))),
}  # fmt: skip
"""Of 40 queries that read other tokens."""


def read_pairs(reads: Reads, samples: int, queries: int, keys: int) -> torch.Tensor:
    """Write out which keys are read, [samples, 1, queries, keys]."""
    found = torch.zeros(samples, 1, queries, keys, dtype=torch.bool)
    own = torch.ones(samples, queries) if reads.queries is None else reads.queries.ids
    others = torch.ones(samples, keys) if reads.keys is None else reads.keys.ids
    for sample, query in itertools.product(range(samples), range(queries)):
        first = 0 if reads.before is None else max(0, query - reads.before + 1)
        stop = keys if reads.after is None else query + reads.after
        found[sample, 0, query, first:stop] = True
        found[sample, 0, query] &= others[sample] == own[sample, query]
    return found


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, read: torch.Tensor
) -> torch.Tensor:
    """The definition, with all scores: [s, b, h, d] each to [s, b, h * d]."""
    repeat = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
    scale = scores.scale or 1 / math.sqrt(query.shape[-1])
    products = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    if scores.cap:
        products = scores.cap * torch.tanh(products / scores.cap)
    weights = products.masked_fill(~read, -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def results(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    out = function(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def check(scores: Scores, reads: Reads, inputs: list[torch.Tensor]) -> None:
    core, read = SdpaAttention(scores), read_pairs(reads, 2, len(inputs[0]), len(inputs[1]))
    found = results(lambda *x: core(*x, reads), inputs)
    expected = results(lambda *x: dense(*x, scores, read), inputs)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("case", [*CASES, *OF_OTHERS])
def test_equals_the_definition(case: str, groups: int) -> None:
    scores, reads = (CASES | OF_OTHERS)[case]
    inputs = random_qkv(TOKENS, HEADS, groups)
    if case in OF_OTHERS:
        inputs[0] = inputs[0].detach()[:40].requires_grad_()
    check(scores, reads, inputs)
    check(replace(scores, recompute=True), reads, inputs)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "COMPILER", "aot_eager")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    yield
    torch.compiler.reset()


FLEX = ["window_over_blocks", "window_on_both_sides_and_padding", "cap", "documents", "each"]


@pytest.mark.parametrize("case", one_in(2, FLEX))
def test_flex_equals_the_definition(case: str, on_cpu: None) -> None:
    scores, reads = CASES[case]
    kernel = FlexKernel.of(reads, TOKENS, torch.device("cpu"))
    inputs = random_qkv(TOKENS, HEADS, 2)
    check(scores, replace(reads, kernel=kernel), inputs)
    check(replace(scores, recompute=True), replace(reads, kernel=kernel), inputs)


@pytest.mark.parametrize("before", [1, 20, flex.BLOCK, flex.BLOCK + 1, flex.BLOCK + 2, None])
@pytest.mark.parametrize("after", [1, 2, flex.BLOCK + 1, flex.BLOCK + 2, None])
def test_blocks_that_flex_skips_are_all_masked(before: int | None, after: int | None) -> None:
    """And blocks that it takes as whole have no masked score."""
    own = documents(BORDERS)
    for queries, keys in ((None, None), (own, own), (None, documents(ENDS))):
        reads = Reads(before, after, queries, keys)
        blocks = FlexKernel.of(reads, TOKENS, torch.device("cpu")).blocks
        if blocks is None:
            assert reads == Reads()
            continue
        at = torch.arange(TOKENS)
        distance = at[:, None] - at
        is_read = (distance < (before or TOKENS)) & (distance > -(after or TOKENS))
        if keys is not None:
            of_queries = torch.ones(2, TOKENS) if queries is None else queries.ids
            is_read = is_read & (of_queries[:, :, None] == keys.ids[:, None, :])
        is_read = is_read.expand(1 if keys is None else 2, -1, -1)
        for sample, row, column in itertools.product(range(len(is_read)), range(3), range(3)):
            places = [slice(i * flex.BLOCK, (i + 1) * flex.BLOCK) for i in (row, column)]
            block = is_read[sample][places[0], places[1]]
            whole_count = blocks.full_kv_num_blocks[sample, 0, row]
            whole = blocks.full_kv_indices[sample, 0, row, :whole_count].tolist()
            some_count = blocks.kv_num_blocks[sample, 0, row]
            some = blocks.kv_indices[sample, 0, row, :some_count].tolist()
            is_computed = column in whole + some
            assert is_computed >= bool(block.any()), (sample, row, column)
            if queries is keys:  # a window may reach the padding alone, in a block with tokens
                assert is_computed == bool(block.any()), (sample, row, column)
            assert (column in whole) <= bool(block.all())
            assert not (column in whole and column in some), "it would be counted twice"


def test_documents_of_cumulative_lengths() -> None:
    found = documents([[0, 2, 5], [0, 5, 5]])
    assert found.lengths == [[2, 3], [5]]
    assert found.ids.tolist() == [[1, 1, 2, 2, 2], [1] * 5]


def test_padding_is_a_second_document() -> None:
    found = Documents.padded(torch.arange(5) < torch.tensor([[3], [5]]))
    assert found.ids.tolist() == [[1, 1, 1, 2, 2], [1] * 5]
    assert found.is_first[:, 0, 0].tolist() == [[True] * 3 + [False] * 2, [True] * 5]


@pytest.mark.parametrize(
    ("scores", "reads"),
    [
        (Scores(), Reads(100, 1)),
        (Scores(), Reads(50, 51)),
        (Scores(cap=1.0), Reads(after=1)),
        (Scores(cap=1.0), Reads(100, 1)),
    ],
)
def test_no_square_matrix_in_memory(scores: Scores, reads: Reads) -> None:
    tokens, core = 2048, SdpaAttention(scores)
    inputs = [torch.randn(tokens, 1, 2, 8, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest:
        core(*inputs, reads).sum().backward()
    keys = tokens if reads.before is None else 3 * CPU_QUERY_BLOCK
    assert largest.elements <= max(2 * CPU_QUERY_BLOCK * keys, 2 * tokens * 8)


@pytest.mark.parametrize(
    ("scores", "reads"),
    [
        (Scores(dropout=0.25), separate(BORDERS, after=1)),
        (Scores(dropout=0.25), Reads(20, 1)),
        (Scores(cap=0.7, dropout=0.25), Reads(after=1)),
        (Scores(dropout=0.25), Reads(keys=documents(ENDS))),
    ],
)
def test_the_backward_pass_drops_the_same_weights(scores: Scores, reads: Reads) -> None:
    query, key, value = (x.permute(1, 2, 0, 3) for x in random_qkv(TOKENS, HEADS, 2))
    out = attend(query, key, value, reads, scores)
    # for given masks the output is linear in `value`, so the gradient gives it back
    (gradient,) = torch.autograd.grad(out.sum(), value)
    assert out.sum().item() == pytest.approx((gradient * value).sum().item(), rel=1e-3)
    without = attend(query, key, value, reads, replace(scores, dropout=0.0))
    assert not torch.allclose(out, without, atol=0.1)
    ones = torch.ones_like(value)
    mean_kept = torch.stack(
        [attend(query, key, ones, reads, scores).detach() for _ in range(20)]
    ).mean()
    assert mean_kept.item() == pytest.approx(1, abs=0.02)
