"""Operations of a step against the published closed formulas and against the weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.flops import (
    forward_flops,
    score_pairs,
    step_hardware_flops,
    step_model_flops,
)
from frontier_llm.geometry.inventory import chunk_parameters
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.model_chunks import ModelChunk
from tests.geometry.models import any_models, any_t5_models, make_model

widths = st.integers(1, 400).map(lambda width: 64 * width)
lengths = st.integers(1, 8192)


def of(tokens: int) -> SampleLengths:
    """Return the lengths of a sample of a GPT."""
    return SampleLengths(0, tokens)


@given(st.integers(1, 128), widths, st.integers(2, 250_000), lengths, st.integers(1, 4096))
def test_a_gpts_step_is_megatrons_formula(layers, hidden, vocabulary, length, samples):
    """Narayanan et al. (arXiv:2104.04473), equation 3: full recomputation."""
    model = make_model(layers=layers, hidden=hidden, vocabulary=vocabulary)
    formula = (
        96
        * samples
        * length
        * layers
        * hidden**2
        * (1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden))
    )
    assert step_hardware_flops(model, of(length), samples, "full") == pytest.approx(
        formula, rel=1e-6
    )


def _matrices(model):
    """Return what is multiplied with, not looked up."""
    chunk = ModelChunk(0, 0, range(model.layers), has_embedding=True, has_head=True)
    looked_up = {"embedding.positions.weight"}
    looked_up |= {"encoder_positions.weight", "decoder_positions.weight"}
    if not model.tied:
        looked_up.add("embedding.tokens.weight")
    parameters = chunk_parameters(model, chunk, 16)
    return [p for p in parameters if len(p.shape) == 2 and p.name not in looked_up]


@given(any_models(), lengths)
def test_every_weight_of_a_matrix_costs_two_operations_a_token(model, length):
    weights = sum(parameter.elements for parameter in _matrices(model))
    once = forward_flops(model, of(length))
    assert once.total - once.attention == pytest.approx(2 * length * weights, rel=1e-9)


def test_a_window_bounds_the_scores_of_its_layers():
    """By a count of the unmasked scores; two of five layers have no window."""
    tokens, width = 100, 64
    layers = {"layers": 5, "heads": 1, "head_dim": width, "hidden": width}
    model = make_model(**layers, window=8, window_every=2)
    unmasked = sum(min(8, query + 1) for query in range(tokens))
    without = tokens * (tokens + 1) / 2
    counted = sum(score_pairs(model, layer, tokens, causal=True) for layer in range(5))
    assert counted == pytest.approx(3 * unmasked + 2 * without, rel=0.02)
    scores = 3 * tokens * 8 + 2 * tokens**2
    assert forward_flops(model, of(tokens)).attention == 4 * width * scores
    encoder = make_model(kind="t5", layers=2, encoder_layers=1, window=8)
    on_both_sides = sum(abs(query - key) < 8 for query in range(tokens) for key in range(tokens))
    assert score_pairs(encoder, 0, tokens, causal=False) == pytest.approx(on_both_sides, rel=0.1)
    assert score_pairs(encoder, 0, 8, causal=False) == 64
    wide = make_model(**layers, window=200)
    assert forward_flops(wide, of(tokens)) == forward_flops(make_model(**layers), of(tokens))


@given(any_t5_models(), st.integers(16, 8192))
def test_every_weight_costs_two_operations_a_token_that_meets_it(model, length):
    both = SampleLengths(length, 8 + length // 3)
    cost = 0
    for parameter in _matrices(model):
        unit, name = parameter.unit, parameter.name
        in_encoder = unit.startswith("layers.") and int(unit[7:]) < model.encoder_layers
        reads_encoder = in_encoder or name.endswith("key_value.weight")
        cost += 2 * parameter.elements * (both.encoder if reads_encoder else both.decoder)
    once = forward_flops(model, both)
    assert once.total - once.attention == pytest.approx(cost, rel=1e-9)


@given(any_models(), lengths)
def test_attention_is_scores_and_weighted_values_of_every_query_head(model, length):
    one_head = 2 * (2 * length * length * model.head_dim)
    attention = forward_flops(model, of(length)).attention
    assert attention == pytest.approx(model.layers * model.heads * one_head, rel=1e-9)


@given(any_models(), lengths, st.integers(1, 64))
def test_recomputation_adds_what_it_runs_again(model, length, samples):
    once, needed = forward_flops(model, of(length)), step_model_flops(model, of(length), samples)
    added = {
        kind: step_hardware_flops(model, of(length), samples, kind) - needed
        for kind in ("none", "selective", "full")
    }
    tolerance = 1e-9 * needed
    assert added["none"] == 0
    assert added["selective"] == pytest.approx(samples * once.attention, abs=tolerance)
    assert added["full"] == pytest.approx(samples * once.layers, abs=tolerance)


def test_the_backward_pass_costs_twice_the_forward():
    model = make_model()
    assert step_model_flops(model, of(32), 5) == 3 * 5 * forward_flops(model, of(32)).total
