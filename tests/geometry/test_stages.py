"""Every layer lies on exactly one piece, and the pieces are as even as they can be."""

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.stages import make_pieces, pieces_of_stage, split_layers


@st.composite
def pipelines(draw):
    """Draw (layers, stages, chunks) with at least a layer a piece."""
    stages, chunks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    return draw(st.integers(stages * chunks, 200)), stages, chunks


@given(pipelines())
def test_the_pieces_tile_the_layers_in_order(pipeline):
    layers, stages, chunks = pipeline
    pieces = make_pieces(layers, stages, chunks)
    assert [layer for piece in pieces for layer in piece.layers] == list(range(layers))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(n, 400), st.just(n))))
def test_an_even_cut_differs_by_one_layer_at_most(case):
    layers, pieces = case
    sizes = split_layers(layers, pieces)
    assert len(sizes) == pieces
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 60).flatmap(lambda n: st.tuples(st.integers(n, 400), st.just(n))))
def test_the_ends_have_a_layer_less_where_it_does_not_divide(case):
    """They also hold the head, which costs most, and the embedding."""
    layers, pieces = case
    sizes = split_layers(layers, pieces)
    if layers % pieces:
        assert sizes[-1] == min(sizes)
    if layers % pieces and pieces - layers % pieces >= 2:
        assert sizes[0] == min(sizes)


@given(pipelines())
def test_pieces_go_around_the_stages_chunk_by_chunk(pipeline):
    layers, stages, chunks = pipeline
    pieces = make_pieces(layers, stages, chunks)
    assert [piece.stage for piece in pieces] == list(range(stages)) * chunks
    for stage in range(stages):
        own = pieces_of_stage(pieces, stage)
        assert [piece.chunk for piece in own] == list(range(chunks))
        assert all(piece.stage == stage for piece in own)


@given(pipelines())
def test_the_embedding_is_on_the_first_piece_and_the_head_on_the_last(pipeline):
    pieces = make_pieces(*pipeline)
    assert [index for index, piece in enumerate(pieces) if piece.has_embedding] == [0]
    assert [index for index, piece in enumerate(pieces) if piece.has_head] == [len(pieces) - 1]
    assert pieces[0].stage == 0
    assert pieces[-1].stage == max(piece.stage for piece in pieces)


@given(st.data())
def test_a_given_cut_is_kept(data):
    stages, chunks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    size = st.integers(1, 9)
    cut = tuple(data.draw(st.lists(size, min_size=stages * chunks, max_size=stages * chunks)))
    pieces = make_pieces(sum(cut), stages, chunks, cut)
    assert tuple(len(piece.layers) for piece in pieces) == cut
    assert [layer for piece in pieces for layer in piece.layers] == list(range(sum(cut)))


def test_megatrons_529b_is_three_layers_a_stage():
    assert split_layers(105, 35) == (3,) * 35
