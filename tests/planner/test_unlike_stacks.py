"""Formulas of encoder layers that differ from decoder layers in more than their length."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from frontier_llm.config import decode
from frontier_llm.config.engine import EngineConfig
from frontier_llm.geometry.flops import equal_layers, forward_flops
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.model_chunks import ModelChunk
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.geometry.wire import SUM_BYTES, ActivationTraffic, all_reduce_bytes
from frontier_llm.planner import compute
from frontier_llm.planner.block import Product, stage_blocks
from tests.geometry.models import make_t5
from tests.values import TINY_T5, tiny_values

WINDOWED = {"layers": 8, "encoder_layers": 4, "window": 4, "window_every": 2}
UNFUSED = EngineConfig().model_copy(update={"fused_attention": False})


def _layout(**model):
    layout = ResolvedLayout.resolve(decode(tiny_values(*TINY_T5, "data.vocabulary=28")), 1, 1)
    changed = layout.model.model_copy(update=model)
    chunk = ModelChunk(0, 0, range(changed.layers), True, True)
    return replace(layout, model=changed, model_chunks=(chunk,))


def test_windows_keep_encoder_and_decoder_layers_apart():
    model = make_t5(**{**WINDOWED, "window": None}).model_copy(update=WINDOWED)
    assert equal_layers(model, range(8)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert equal_layers(model, range(2, 5)) == [[2], [3], [4]]


def test_a_windowed_encoder_is_counted_with_its_own_length():
    plain = make_t5(layers=8, encoder_layers=4)
    windowed = plain.model_copy(update=WINDOWED)
    lengths = SampleLengths(64, 24)
    saved = (
        4
        * plain.heads
        * plain.head_dim
        * 2
        * (lengths.encoder * (lengths.encoder - 7) + lengths.decoder * (lengths.decoder - 4))
    )
    more = forward_flops(plain, lengths).attention - forward_flops(windowed, lengths).attention
    assert more == pytest.approx(saved)
    assert forward_flops(plain, lengths).head == forward_flops(windowed, lengths).head


def test_an_encoder_with_a_window_reads_fewer_pairs():
    layout = _layout(**WINDOWED)
    (blocks,) = stage_blocks(layout, layout.model_chunks)
    flops = [block.attention_flops for block, _ in blocks]
    width, tokens = layout.model.heads * layout.model.head_dim, layout.lengths.encoder
    samples = layout.micro_batch
    assert flops[0] == 4 * width * samples * tokens * 7  # on both sides
    assert flops[1] == 4 * width * samples * tokens**2
    assert [count for _, count in blocks] == [2, 2, 2, 2]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_norms_send_sums_of_the_tokens_of_their_side(recompute):
    model = make_t5(layers=4, encoder_layers=2).model_copy(update={"qk_norm": "width"})
    lengths = SampleLengths(40, 16)
    traffic = ActivationTraffic(model, lengths, 3, 2, False, recompute, 2)
    passes = 2 if recompute == "none" else 3

    def expected(*tokens):
        return passes * sum(all_reduce_bytes(2 * 3 * t * SUM_BYTES, 2) for t in tokens)

    chunks = {(0, 2): (40, 40), (1, 3): (40, 16), (2, 4): (16, 16)}
    for (first, stop), tokens in chunks.items():
        chunk = ModelChunk(0, 0, range(first, stop), False, False)
        assert traffic.norm_bytes(chunk) == expected(*tokens)
        assert traffic.norm_messages(chunk) == passes * 2


def test_unfused_attention_multiplies_matrices_of_its_own_lengths():
    """An encoder layer has [s, e] [e, s] products, a decoder layer [t, d] [d, t] and [d, s]."""
    layout = _layout(encoder_head_dim=12)
    calls = []

    def product(shape, count):
        calls.append((tuple(shape), count))
        return 1.0

    speed = SimpleNamespace(product=product, moved=lambda *_: 0.0)
    (blocks,) = stage_blocks(layout, layout.model_chunks)
    s, t, d = layout.lengths.encoder, layout.lengths.decoder, layout.model.head_dim
    heads = layout.micro_batch * layout.model.heads
    assert s != t
    encoder, decoder = (block for block, _ in blocks)
    compute._attention(layout, encoder, speed, UNFUSED)
    assert calls == [(Product(s, 12, s), heads), (Product(s, s, 12), heads)]
    calls.clear()
    compute._attention(layout, decoder, speed, UNFUSED)
    assert calls == [
        *((Product(t, d, t), heads), (Product(t, t, d), heads)),
        *((Product(t, d, s), heads), (Product(t, s, d), heads)),
    ]
