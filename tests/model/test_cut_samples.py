"""Attention of cut samples against the whole samples, and the bytes that ranks send for it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from frontier_llm.geometry.context_cut import HeadExchange, most_rows, sent_tokens
from frontier_llm.geometry.wire import ActivationTraffic
from frontier_llm.model import attention
from frontier_llm.model.attention import attend as attend_whole
from frontier_llm.model.attention import attend_document
from frontier_llm.model.cut_samples import ContextPart
from frontier_llm.model.reads import Documents, Reads, Scores
from frontier_llm.parallel.context_ranks import ContextRanks
from tests.geometry.models import make_model
from tests.model.context_traffic import context_bytes
from tests.ranks import run_ranks

HEADS, KEY_HEADS, WIDTH, TOKENS = 4, 2, 8, 64
LENGTHS = [[17, 1, 30, 7, 9], [64], [8, 8, 24, 24]]
KINDS = [(cap, window) for cap, window in ((None, None), (None, 6), (0.5, None), (0.5, 20))]


def _draw(samples, tokens, seed=0, key_heads=KEY_HEADS):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(samples, heads, tokens, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def _documents(lengths):
    table = torch.full((len(lengths), 1 + max(map(len, lengths))), TOKENS, dtype=torch.int32)
    for row, of_sample in zip(table, lengths, strict=True):
        row[: len(of_sample) + 1] = torch.tensor([0, *of_sample]).cumsum(0)
    return Documents(table, TOKENS)


@pytest.mark.parametrize(("cap", "window"), KINDS)
@pytest.mark.parametrize("queries", [1, 4, 5, 11, 23])
@pytest.mark.parametrize("block", [4, 128])
def test_the_last_query_reads_the_last_key(monkeypatch, cap, window, queries, block):
    monkeypatch.setattr(attention, "CPU_QUERY_BLOCK", block)
    query, key, value = _draw(1, 23)
    last = query[:, :, -queries:]
    found = attend_document(last, key, value, Reads(window, 1), Scores(cap=cap), 23 - queries)
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    products = query @ key.transpose(2, 3) / WIDTH**0.5
    if cap is not None:
        products = cap * torch.tanh(products / cap)
    distance = torch.arange(23)[:, None] - torch.arange(23)
    is_read = (distance >= 0) & (distance < (window or 23))
    whole = products.masked_fill(~is_read, -torch.inf).softmax(-1) @ value
    tolerance = 1e-13 if cap is None else 1e-6  # capped scores are stored in fp32
    torch.testing.assert_close(found, whole[:, :, -queries:], rtol=0, atol=tolerance)


def _taken(tensor, tokens):
    """Return some tokens of each sample."""
    return torch.stack([sample[:, own] for sample, own in zip(tensor, tokens, strict=True)])


def attend(world, lengths, cap, window, keeps, key_heads=KEY_HEADS, changed=None):
    """Return outputs and gradients of this rank's tokens, and the bytes sent to each rank."""
    ranks = ContextRanks(dist.group.WORLD)
    inputs = _draw(len(lengths), TOKENS, key_heads=key_heads)
    if changed is not None:
        for tensor in inputs:
            tensor[0, :, changed] += 1
    documents, device = _documents(lengths), inputs[0].device
    part = ContextPart(ranks, len(lengths), TOKENS, documents, device, keeps=keeps)
    own = part.tokens
    local = [_taken(tensor, own).requires_grad_() for tensor in inputs]
    output = part.attend(*local, Reads(window, 1), Scores(cap=cap))
    output.backward(_taken(_draw(len(lengths), TOKENS, seed=1)[0], own))
    return own, output.detach(), [tensor.grad for tensor in local], ranks.take_sent()


def attend_all(world, cases, pays=HeadExchange.pays):
    HeadExchange.pays = pays  # of this rank alone
    return [attend(world, *case) for case in cases]


def _whole(results, part):
    """Put the tokens of all ranks together."""
    own = torch.cat([result[0] for result in results], dim=1)
    return _taken(torch.cat([part(result) for result in results], dim=2), own.argsort(dim=1))


def _is_whole(case, results):
    """Check outputs and gradients of cut samples against those of whole samples."""
    lengths, cap, window, _, key_heads = case
    documents = _documents(lengths)
    reads = Reads(window, 1, documents, documents)
    inputs = [x.requires_grad_() for x in _draw(len(lengths), TOKENS, key_heads=key_heads)]
    output = attend_whole(*inputs, reads, Scores(cap=cap))
    output.backward(_draw(len(lengths), TOKENS, seed=1)[0])
    tolerance = 1e-13 if cap is None else 1e-6
    found = _whole(results, lambda result: result[1])
    torch.testing.assert_close(found, output.detach(), rtol=0, atol=tolerance)
    for number, tensor in enumerate(inputs):
        found = _whole(results, lambda result, number=number: result[2][number])
        torch.testing.assert_close(found, tensor.grad, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_whole_samples_and_send_what_is_predicted(ranks):
    cases = [(LENGTHS, *kind, keeps, KEY_HEADS) for kind in KINDS for keeps in (False, True)]
    cases += [([[TOKENS]], None, None, keeps, heads) for keeps in (False, True) for heads in (2, 4)]
    cases += [([[TOKENS // ranks // 2] * 2 * ranks], None, None, False, KEY_HEADS)]
    by_rank = run_ranks(attend_all, ranks, cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        _is_whole(case, results)
        for rank, result in enumerate(results):
            assert result[3] == _predicted(case, ranks, rank)
    assert not any(sum(result[3]) for result in results), "whole documents are on one rank"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_ranks_compute_some_heads_of_whole_samples(ranks, key_heads):
    cases = [(LENGTHS, *kind, False, key_heads) for kind in KINDS]
    cases += [([[TOKENS]], None, None, True, key_heads)]
    by_rank = run_ranks(attend_all, ranks, cases, lambda *_, **__: True)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        _is_whole(case, results)
        to_one = len(case[0]) * TOKENS // ranks * WIDTH * 8  # of one head
        for rank, result in enumerate(results):
            assert sum(result[3]) == 2 * (ranks - 1) * to_one * 2 * (
                HEADS // ranks + max(1, key_heads // ranks)
            )
            assert result[3][rank] == 0


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "pays"),
    [
        (32, 32, 2, True), (32, 8, 2, False), (32, 8, 4, True), (32, 1, 4, False),
        (12, 4, 3, False), (12, 6, 4, False),
    ],
)  # fmt: skip
def test_heads_are_sent_if_they_are_fewer_bytes(heads, key_heads, ranks, pays):
    """Of a sample that is one document, whose last part reads all others."""
    exchange, rows = HeadExchange(ranks, heads, key_heads), most_rows([[2 * ranks]], ranks)
    assert exchange.pays(rows, 2, recomputes=False) == pays


def _predicted(case, ranks, rank):
    lengths, _, _, keeps, key_heads = case
    model = make_model(heads=HEADS, kv_heads=key_heads, head_dim=WIDTH, hidden=HEADS * WIDTH)
    recompute = "full" if keeps else "none"
    traffic = ActivationTraffic(model, SimpleNamespace(), 1, 1, False, recompute, 8)
    sent = context_bytes(traffic, lengths, ranks, rank, 1)
    if not keeps:
        return sent
    # without the first forward pass of the layer, which is not computed again here
    rows, tokens = most_rows(lengths, ranks), len(lengths) * TOKENS // ranks
    if traffic.head_exchange(ranks).pays(rows, tokens, recomputes=True):
        return [size * 2 // 3 for size in sent]
    read = [sum(of) for of in zip(*(sent_tokens(one, ranks)[rank] for one in lengths), strict=True)]
    read[rank] = 0
    return [n - traffic.row_bytes * count for n, count in zip(sent, read, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_document_reads_another_one(ranks):
    """Bitwise: the third document of the first sample is changed."""
    changed = slice(18, 48)
    cases = [
        (LENGTHS, None, window, False, KEY_HEADS, part)
        for window in (None, 7)
        for part in (None, changed)
    ]
    outputs = [
        _whole(results, lambda result: result[1])
        for results in zip(*run_ranks(attend_all, ranks, cases), strict=True)
    ]
    for before, after in (outputs[:2], outputs[2:]):
        moved = (before != after).any(dim=3).any(dim=1)
        assert moved[0, changed].all()
        moved[0, changed] = False
        assert not moved.any()
