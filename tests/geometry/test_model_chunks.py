"""Every layer lies in exactly one model chunk, and the chunks are as even as possible."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.model_chunks import make_model_chunks, split_layers
from frontier_llm.geometry.pipeline_schedule import Placement


@st.composite
def pipelines(draw):
    """Draw (layers, placement) with at least one layer per chunk."""
    placement = Placement(draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.booleans()))
    return draw(st.integers(placement.chunks, 200)), placement


@given(pipelines())
def test_the_chunks_tile_the_layers_in_order(pipeline):
    chunks = make_model_chunks(*pipeline)
    assert [layer for chunk in chunks for layer in chunk.layers] == list(range(pipeline[0]))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(n, 400), st.just(n))))
def test_an_even_cut_differs_by_one_layer_at_most(case):
    layers, chunks = case
    sizes = split_layers(layers, chunks)
    assert len(sizes) == chunks
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 60).flatmap(lambda n: st.tuples(st.integers(n, 400), st.just(n))))
def test_the_ends_have_a_layer_less_where_it_does_not_divide(case):
    """They also hold the head, which costs most, and the embedding."""
    layers, chunks = case
    sizes = split_layers(layers, chunks)
    if layers % chunks:
        assert sizes[-1] == min(sizes)
    if layers % chunks and chunks - layers % chunks >= 2:
        assert sizes[0] == min(sizes)


@given(pipelines())
def test_virtual_stages_go_around_the_stages_or_forth_and_back(pipeline):
    chunks = make_model_chunks(*pipeline)
    _, placement = pipeline
    stages = list(range(placement.stages))
    rounds = [
        stages[::-1] if placement.folded and virtual_stage % 2 else stages
        for virtual_stage in range(placement.virtual_stages)
    ]
    assert [chunk.stage for chunk in chunks] == list(chain.from_iterable(rounds))
    for stage in stages:
        own = tuple(chunk for chunk in chunks if chunk.stage == stage)
        assert [chunk.virtual_stage for chunk in own] == list(range(placement.virtual_stages))
        assert own == tuple(chunks[placement.chunk(stage, c.virtual_stage)] for c in own)
        assert all(chunk.stage == stage for chunk in own)


@given(pipelines())
def test_the_embedding_comes_first_and_the_head_last(pipeline):
    chunks = make_model_chunks(*pipeline)
    assert [index for index, chunk in enumerate(chunks) if chunk.has_embedding] == [0]
    assert [index for index, chunk in enumerate(chunks) if chunk.has_head] == [len(chunks) - 1]
    assert chunks[0].stage == 0
    is_back = pipeline[1].folded and pipeline[1].virtual_stages % 2 == 0
    assert chunks[-1].stage == (0 if is_back else pipeline[1].stages - 1)


@given(st.data())
def test_a_given_cut_is_kept(data):
    stages, virtual_stages = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    count = stages * virtual_stages
    size = st.integers(1, 9)
    cut = tuple(data.draw(st.lists(size, min_size=count, max_size=count)))
    chunks = make_model_chunks(sum(cut), Placement(stages, virtual_stages), cut)
    assert tuple(len(chunk.layers) for chunk in chunks) == cut
    assert [layer for chunk in chunks for layer in chunk.layers] == list(range(sum(cut)))


def test_megatrons_529b_is_three_layers_a_stage():
    assert split_layers(105, 35) == (3,) * 35
