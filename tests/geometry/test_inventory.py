"""The parameters that are counted without building a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.inventory import (
    chunk_parameters,
    count_parameters,
    layer_parameters,
    padded_vocabulary,
)
from frontier_llm.geometry.model_chunks import ModelChunk, make_model_chunks
from frontier_llm.geometry.pipeline_schedule import Placement
from tests.geometry.models import any_models, make_model


def _whole(model, sequence_length):
    chunk = ModelChunk(0, 0, range(model.layers), has_embedding=True, has_head=True)
    return list(chunk_parameters(model, chunk, sequence_length))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 300), st.integers(1, 32))
def test_a_gpts_count_is_the_closed_formula(layers, width, vocabulary, positions):
    """Narayanan et al. (arXiv:2104.04473), equation 2, with the last norm, which it leaves out."""
    hidden = 4 * width
    model = make_model(layers=layers, hidden=hidden, vocabulary=vocabulary)
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + positions) * hidden
    assert count_parameters(model, positions) == formula + 2 * hidden


@given(any_models(), st.integers(1, 5), st.integers(1, 3))
def test_a_pipelines_chunks_hold_the_whole_model(model, stages, virtual_stages):
    if stages * virtual_stages > model.layers:
        stages, virtual_stages = 1, 1
    chunks = make_model_chunks(model.layers, Placement(stages, virtual_stages))
    held = [p for chunk in chunks for p in chunk_parameters(model, chunk, 16)]
    assert set(held) == set(_whole(model, 16))
    copies = 1 if model.tied and len(chunks) > 1 else 0
    assert len(held) == len(set(held)) + copies


@given(any_models())
def test_names_are_unique_and_norms_are_those_that_are_no_matrices(model):
    parameters = _whole(model, 16)
    assert len({p.name for p in parameters}) == len(parameters)
    assert all(p.is_matrix == (len(p.shape) == 2) for p in parameters)


@given(any_models(), st.integers(1, 4))
def test_tensor_ranks_cut_a_dim_that_heads_and_ffn_divide(model, tensor):
    """What divides the heads and the ffn divides every cut dim of a layer."""
    cut = make_model(
        **{
            **model.model_dump(),
            "heads": model.heads * tensor,
            "kv_heads": model.kv_heads * tensor,
            "ffn": model.ffn * tensor,
        }
    )
    for parameter in layer_parameters(cut, 0):
        if parameter.cut_dim is not None:
            assert parameter.shape[parameter.cut_dim] % tensor == 0


def test_a_row_cut_matrix_keeps_its_bias_whole():
    cuts = {p.name: p.cut_dim for p in layer_parameters(make_model(), 3)}
    assert (cuts["layers.3.ffn.up.weight"], cuts["layers.3.ffn.up.bias"]) == (0, 0)
    assert (cuts["layers.3.ffn.down.weight"], cuts["layers.3.ffn.down.bias"]) == (1, None)
    assert cuts["layers.3.ffn_norm.weight"] is None


def test_grouped_queries_and_gates_have_the_shapes_of_their_matrices():
    model = make_model(heads=8, kv_heads=2, head_dim=16, ffn=96, activation="swiglu", bias=False)
    shapes = {p.name: p.shape for p in layer_parameters(model, 0)}
    assert shapes["layers.0.attention.qkv.weight"] == (8 * 16 + 2 * 2 * 16, 64)
    assert shapes["layers.0.attention.output.weight"] == (64, 8 * 16)
    assert shapes["layers.0.ffn.gate.weight"] == shapes["layers.0.ffn.up.weight"] == (96, 64)
    assert not any(name.endswith("bias") and "norm" not in name for name in shapes)


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "padded"),
    [(50257, 1, 50304), (50257, 8, 51200), (50257, 4, 50688), (32000, 2, 32000), (1, 1, 128)],
)
def test_the_vocabulary_is_padded_to_128_rows_a_tensor_rank(vocabulary, tensor, padded):
    model = make_model(vocabulary=max(2, vocabulary))
    assert padded_vocabulary(model, tensor) == padded
