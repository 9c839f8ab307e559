"""Windows, documents and capped scores against the matrix of all scores."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from frontier_llm.model import flex
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.confined import QUERY_BLOCK, Documents, Scores, confined_attention
from frontier_llm.model.flex import FlexMasks
from tests.model.test_attention import LargestTensor, random_qkv

TOKENS = 2 * QUERY_BLOCK + 9
HEADS = 4
BORDERS = torch.tensor(
    [[0, 1, 5, QUERY_BLOCK + 7, TOKENS], [0, 2 * QUERY_BLOCK, TOKENS, TOKENS, TOKENS]],
    dtype=torch.int32,
)
CASES = {
    "window": (Scores(window=20), False),
    "window_of_one": (Scores(window=1), False),
    "window_of_a_block": (Scores(window=QUERY_BLOCK), False),
    "window_over_blocks": (Scores(window=QUERY_BLOCK + 2), False),
    "window_over_all": (Scores(window=TOKENS), False),
    "cap": (Scores(cap=0.7), False),
    "documents": (Scores(), True),
    "all": (Scores(scale=1.0, window=20, cap=0.7), True),
}


def make_core(scores: Scores) -> SdpaAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=HEADS, use_cpu_initialization=True
    )
    return SdpaAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        attention_dropout=0.0,
        softmax_scale=scores.scale,
        scores=scores,
    )


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, borders: list
) -> torch.Tensor:
    """The definition, with all scores: [s, b, h, d] each to [s, b, h * d]."""
    repeat = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)
    scale = scores.scale or 1 / math.sqrt(query.shape[-1])
    products = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    if scores.cap:
        products = scores.cap * torch.tanh(products / scores.cap)
    is_read = torch.zeros(len(borders), 1, len(query), len(query), dtype=torch.bool)
    for sample, row in enumerate(borders):
        for start, stop in itertools.pairwise(row):
            for at in range(start, stop):
                first = max(start, at + 1 - (scores.window or stop))
                is_read[sample, 0, at, first : at + 1] = True
    weights = products.masked_fill(~is_read, -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def results(function: object, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(TOKENS, 2, 8 * HEADS, generator=torch.Generator().manual_seed(1))
    out = function(*inputs)  # type: ignore[operator]
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case: str, groups: int) -> None:
    scores, has_documents = CASES[case]
    documents = Documents(BORDERS, TOKENS) if has_documents else None
    borders = BORDERS.tolist() if has_documents else [[0, TOKENS]] * 2
    inputs = random_qkv(TOKENS, HEADS, groups)
    core = make_core(scores)
    found = results(lambda *x: core(*x, attention_bias=documents), inputs)
    expected = results(lambda *x: dense(*x, scores, borders), inputs)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["window_over_blocks", "cap", "documents", "all"])
def test_flex_equals_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "COMPILER", "aot_eager")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    scores, has_documents = CASES[case]
    documents = Documents(BORDERS, TOKENS) if has_documents else None
    borders = BORDERS.tolist() if has_documents else [[0, TOKENS]] * 2
    inputs = random_qkv(TOKENS, HEADS, 2)
    masks = FlexMasks.of({scores.window}, TOKENS, documents, torch.device("cpu"))
    core = make_core(scores)
    found = results(lambda *x: core(*x, attention_bias=masks), inputs)
    expected = results(lambda *x: dense(*x, scores, borders), inputs)
    torch.compiler.reset()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 20, flex.BLOCK, flex.BLOCK + 1, flex.BLOCK + 2, None])
def test_blocks_that_flex_skips_are_all_masked(window: int | None) -> None:
    """And blocks that it takes as whole have no masked score."""
    documents = Documents(BORDERS, TOKENS)
    cases = [(None, torch.zeros(1, TOKENS)), (documents, documents.ids)]
    for given, ids in cases:
        blocks = FlexMasks.of({window}, TOKENS, given, torch.device("cpu")).blocks[window]
        distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        is_read = (distance >= 0) & (distance < (window or TOKENS))
        is_read = is_read & (ids[:, :, None] == ids[:, None, :])
        for sample, row, column in itertools.product(range(len(ids)), range(3), range(3)):
            at = [slice(i * flex.BLOCK, (i + 1) * flex.BLOCK) for i in (row, column)]
            block = is_read[sample][at[0], at[1]]
            whole_count = blocks.full_kv_num_blocks[sample, 0, row]
            whole = blocks.full_kv_indices[sample, 0, row, :whole_count].tolist()
            some_count = blocks.kv_num_blocks[sample, 0, row]
            some = blocks.kv_indices[sample, 0, row, :some_count].tolist()
            assert (column in whole + some) == bool(block.any()), (sample, row, column)
            assert (column in whole) <= bool(block.all())


def test_documents_of_cumulative_lengths() -> None:
    documents = Documents(torch.tensor([[0, 2, 5], [0, 5, 5]], dtype=torch.int32), 5)
    assert documents.lengths == [[2, 3], [5]]
    assert documents.ids.tolist() == [[1, 1, 2, 2, 2], [1] * 5]


@pytest.mark.parametrize(
    "scores", [Scores(window=100), Scores(cap=1.0), Scores(window=100, cap=1.0)]
)
def test_no_square_matrix_in_memory(scores: Scores) -> None:
    tokens = 2048
    core = make_core(scores)
    inputs = [torch.randn(tokens, 1, 2, 8, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest:
        core(*inputs).sum().backward()
    keys = tokens if scores.window is None else 2 * QUERY_BLOCK
    assert largest.elements <= max(2 * QUERY_BLOCK * keys, 2 * tokens * 8)


@pytest.mark.parametrize(
    ("scores", "documents"),
    [
        (Scores(dropout=0.25), Documents(BORDERS, TOKENS)),
        (Scores(window=20, dropout=0.25), None),
        (Scores(cap=0.7, dropout=0.25), None),
    ],
)
def test_the_backward_pass_drops_the_same_weights(
    scores: Scores, documents: Documents | None
) -> None:
    query, key, value = (x.permute(1, 2, 0, 3) for x in random_qkv(TOKENS, HEADS, 2))
    out = confined_attention(query, key, value, scores, documents)
    # for given masks the output is linear in `value`, so the gradient gives it back
    (gradient,) = torch.autograd.grad(out.sum(), value)
    assert out.sum().item() == pytest.approx((gradient * value).sum().item(), rel=1e-3)
    without = confined_attention(query, key, value, replace(scores, dropout=0.0), documents)
    assert not torch.allclose(out, without, atol=0.1)
    mean_kept = torch.stack(
        [confined_attention(query, key, torch.ones_like(value), scores, documents).detach()
         for _ in range(20)]
    ).mean()  # fmt: skip
    assert mean_kept.item() == pytest.approx(1, abs=0.02)
