"""One list of encoder and decoder layers, cut anywhere; lengths of inputs and targets."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import decode
from frontier_llm.config.denoisers import divided, sample_parts
from frontier_llm.geometry.inventory import (
    chunk_parameters,
    count_parameters,
    model_shapes,
    shared_parameters,
)
from frontier_llm.geometry.lengths import sample_lengths
from frontier_llm.geometry.model_chunks import chunk_stacks, make_model_chunks
from frontier_llm.geometry.pipeline_schedule import Placement
from tests.geometry.models import any_t5_models, make_model, make_t5
from tests.values import tiny_values


@st.composite
def cut_models(draw):
    """Draw an encoder-decoder and its chunks, cut at random."""
    model = draw(any_t5_models())
    borders = draw(st.sets(st.integers(1, model.layers - 1), max_size=5))
    ends = [0, *sorted(borders), model.layers]
    sizes = tuple(b - a for a, b in itertools.pairwise(ends))
    virtual = draw(st.sampled_from([c for c in (1, 2, 3) if len(sizes) % c == 0]))
    return model, make_model_chunks(model.layers, Placement(len(sizes) // virtual, virtual), sizes)


@given(cut_models())
def test_stacks_tile_the_chunks_and_end_once(case):
    model, chunks = case
    stacks = [stack for chunk in chunks for stack in chunk_stacks(model, chunk)]
    assert [layer for stack in stacks for layer in stack.layers] == list(range(model.layers))
    assert all(
        (stack.name == "encoder") == (layer < model.encoder_layers)
        for stack in stacks
        for layer in stack.layers
    )
    assert [stack.norm_unit for stack in stacks if stack.ends] == ["encoder_norm", "final_norm"]
    assert all(stack.layers.stop in (model.encoder_layers, model.layers)
               for stack in stacks if stack.ends)  # fmt: skip


@given(cut_models())
def test_chunks_hold_the_whole_model_and_copies_of_the_tables_they_need(case):
    model, chunks = case
    held = [shape.name for chunk in chunks for shape in chunk_parameters(model, chunk, 16)]
    assert set(held) == set(model_shapes(model, 16))
    found = shared_parameters(model, chunks)
    for name in set(held):
        assert held.count(name) == len(found.get(name, (None,)))
    for side in ("encoder", "decoder"):
        needed = [p for p in chunks if side in {s.name for s in chunk_stacks(model, p)}]
        assert found.get(f"{side}_positions.weight", tuple(needed)) == tuple(needed)


@given(cut_models())
def test_copies_lie_in_units_of_one_layout(case):
    """What is added up over stages are equal intervals of equal buffers."""
    model, chunks = case
    for name, held in shared_parameters(model, chunks).items():
        layouts = set()
        for chunk in held:
            shapes = list(chunk_parameters(model, chunk, 16))
            unit = next(shape.unit for shape in shapes if shape.name == name)
            layouts.add(tuple((s.shape, s.group, s.name == name) for s in shapes if s.unit == unit))
        assert len(layouts) == 1


def test_a_tied_head_is_a_copy_in_the_last_chunk():
    model = make_model(tied=True)
    assert shared_parameters(model, make_model_chunks(4, Placement(1))) == {}
    chunks = make_model_chunks(4, Placement(2, 2))
    assert shared_parameters(model, chunks) == {"embedding.tokens.weight": (chunks[0], chunks[-1])}
    assert shared_parameters(make_model(tied=False), chunks) == {}


def test_a_decoder_layer_has_a_second_attention_and_its_norm():
    model = make_t5(layers=2, encoder_layers=1, hidden=8, heads=2, head_dim=4, ffn=16)
    attention, ffn, norm = 4 * 8 * 8, 3 * 8 * 16, 8
    layers = 3 * attention + 2 * ffn + 5 * norm
    tables, norms, ends = 2 * model.relative_buckets * 2, 2 * norm, 2 * model.vocabulary * 8
    assert count_parameters(model, 16) == layers + tables + norms + ends


@given(st.integers(16, 4096))
def test_lengths_are_the_longest_text_that_leaves_as_many_tokens(inputs):
    """T5's own search (arXiv:1910.10683): sentinels and ends counted, nothing padded."""
    found = sample_parts(inputs)
    assert found.inputs <= inputs < divided(found.text + 1).inputs
    assert found.inputs + found.targets - found.text - 2 == 2 * found.spans
    assert found.spans >= 1


def test_the_lengths_of_t5_and_mt5():
    """512 tokens of input come from 568 of text, with 114 of targets; 1024 from 1137, with 229."""
    t5, mt5 = sample_parts(512), sample_parts(1024)
    assert (t5.text, t5.inputs, t5.targets) == (568, 512, 114)
    assert (mt5.text, mt5.inputs, mt5.targets) == (1137, 1024, 229)
    data = decode(tiny_values("data.sequence_length=1024")).data
    lengths = sample_lengths(make_t5(), data)
    assert (lengths.encoder, lengths.decoder, lengths.total) == (1024, 232, 1256)
    assert sample_lengths(make_model(), data).total == 1024
