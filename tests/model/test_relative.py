"""Relative positions: buckets, the bias of a block, and attention that learns them."""

import math
from typing import Any

import pytest
import torch

from frontier_llm.geometry.state_memory import CPU_QUERY_BLOCK, QUERY_BLOCK
from frontier_llm.model.attention import SdpaAttention
from frontier_llm.model.reads import Documents, Reads, Scores
from frontier_llm.model.relative import RelativePositions, block_bias, bucket_of_distance
from tests.model import plain_t5
from tests.model.test_attention import LargestTensor, random_qkv

HEADS, REACH = 4, 20


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 12), (16, 20)])
def test_buckets_are_t5s(buckets: int, distance: int, causal: bool) -> None:
    found = bucket_of_distance(buckets, distance, causal=causal).tolist()
    expected = [
        plain_t5.bucket(place, buckets, distance, both_sides=not causal)
        for place in range(-distance, distance + 1)
    ]
    assert found == expected
    far = plain_t5.bucket(-10 * distance, buckets, distance, both_sides=not causal)
    assert found[0] == far
    assert max(found) < buckets


def dense(of_distance: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Write the bias out, [h, queries, keys]."""
    reach = len(of_distance) // 2
    device = of_distance.device
    keys_at, queries_at = (torch.arange(n, device=device) for n in (keys, queries))
    places = keys_at[None, :] - queries_at[:, None]
    return of_distance[places.clamp(-reach, reach) + reach].permute(2, 0, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [range(0, 7), range(5, 50), range(49, 50)])
def test_a_block_is_a_part_of_the_whole(rows: range, causal: bool) -> None:
    of_distance = torch.randn(2 * REACH + 1, HEADS, generator=torch.Generator().manual_seed(0))
    keys = rows.stop if causal else 61
    whole = dense(of_distance, 50, keys)
    if causal:
        hidden = torch.arange(keys)[None, :] > torch.arange(50)[:, None]
        whole = whole.masked_fill(hidden, -math.inf)
    found = block_bias(of_distance, rows, keys, Reads(after=1 if causal else None), None)
    torch.testing.assert_close(found[0], whole[:, rows.start : rows.stop])


CAUSAL, ALL = Reads(after=1), Reads()


def make_core() -> SdpaAttention:
    return SdpaAttention(Scores(scale=1.0))


def textbook(inputs: list[Any], mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    query, key, value, of_distance = inputs
    scores = torch.einsum("sbhd,tbhd->bhst", query, key)
    scores = scores + dense(of_distance, len(query), len(key))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    if causal:
        later = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


@pytest.mark.parametrize("case", ["causal", "both_sides", "padded"])
def test_equals_textbook_attention_and_its_gradients(case: str) -> None:
    tokens = CPU_QUERY_BLOCK + 9  # two blocks, the second ragged
    table = torch.randn(2 * REACH + 1, HEADS, generator=torch.Generator().manual_seed(2))
    inputs = [*random_qkv(tokens, HEADS, HEADS), table.requires_grad_()]
    mask = torch.arange(tokens) < torch.tensor([[tokens], [7]]) if case == "padded" else None
    causal = case == "causal"
    core, keys = make_core(), None if mask is None else Documents.padded(mask)
    reads = Reads(after=1 if causal else None, keys=keys)
    weight = torch.randn(tokens, 2, 8 * HEADS, generator=torch.Generator().manual_seed(1))
    results = []
    for out in (core(*inputs[:3], reads, inputs[3]), textbook(inputs, mask, causal)):
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_equals_textbook_attention_on_a_device() -> None:
    tokens = QUERY_BLOCK + 9
    table = torch.randn(2 * REACH + 1, HEADS, generator=torch.Generator().manual_seed(2))
    sources = [*random_qkv(tokens, HEADS, HEADS), table]
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in sources]
    core, results = make_core(), []
    for out in (core(*inputs[:3], CAUSAL, inputs[3]), textbook(inputs, None, True)):
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


def test_cross_attention_of_other_lengths_sees_no_padding() -> None:
    query, key, value = random_qkv(50, HEADS, HEADS)
    query = query[:11]
    mask = torch.arange(50) < torch.tensor([[50], [23]])
    out = make_core()(query, key, value, Reads(keys=Documents.padded(mask)))
    nothing = torch.zeros(2 * REACH + 1, HEADS)
    expected = textbook([query, key, value, nothing], mask, causal=False)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reads", [CAUSAL, ALL])
def test_no_square_matrix_in_memory(reads: Reads) -> None:
    tokens = 1024
    inputs = [torch.randn(tokens, 1, HEADS, 8, requires_grad=True) for _ in range(3)]
    table = torch.randn(2 * REACH + 1, HEADS, requires_grad=True)
    core = make_core()
    with LargestTensor() as largest:
        core(*inputs, reads, table).sum().backward()
    assert largest.elements <= HEADS * CPU_QUERY_BLOCK * tokens


def test_nothing_square_is_kept_for_the_backward_pass() -> None:
    tokens = 512
    inputs = [torch.randn(tokens, 1, HEADS, 8, requires_grad=True) for _ in range(3)]
    table = torch.randn(2 * REACH + 1, HEADS, requires_grad=True)
    core, kept = make_core(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        core(*inputs, ALL, table)
    assert max(kept) <= tokens * HEADS * 8


def test_the_table_gives_each_distance_its_bucket_and_gets_its_gradient() -> None:
    positions = RelativePositions(8, 12, 3, causal=False, dtype=torch.float32)
    torch.nn.init.normal_(positions.weight)
    out = positions()
    assert out.shape == (25, 3)
    assert torch.equal(out[12], positions.weight[0])  # a token and itself
    out.sum().backward()
    uses = torch.bincount(positions.bucket, minlength=8).float()
    torch.testing.assert_close(positions.weight.grad, uses[:, None].expand(8, 3))
