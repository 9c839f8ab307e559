"""A unit's parameters lie side by side in its flat buffer, the decayed ones first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.geometry.flat_layout import flat_layout

parameters = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=20)


def _ranges(layout, sizes):
    return [range(start, start + size) for start, size in zip(layout.starts, sizes, strict=True)]


@given(parameters, st.integers(1, 16))
def test_the_parameters_tile_the_used_part(items, multiple):
    sizes, decayed = zip(*items, strict=True)
    layout = flat_layout(sizes, decayed, multiple)
    elements = sorted(element for span in _ranges(layout, sizes) for element in span)
    assert elements == list(range(layout.used))
    assert layout.used == sum(sizes)


@given(parameters)
def test_decayed_parameters_are_one_range_and_the_rest_another(items):
    sizes, decayed = zip(*items, strict=True)
    layout = flat_layout(sizes, decayed)
    for span, decays in zip(_ranges(layout, sizes), decayed, strict=True):
        assert span.stop <= layout.decayed if decays else span.start >= layout.decayed


@given(parameters)
def test_parameters_of_a_kind_keep_their_order(items):
    sizes, decayed = zip(*items, strict=True)
    starts = flat_layout(sizes, decayed).starts
    for kind in (True, False):
        own = [start for start, decays in zip(starts, decayed, strict=True) if decays is kind]
        assert own == sorted(own)


@given(parameters, st.integers(1, 64))
def test_padding_fills_to_the_multiple_and_no_further(items, multiple):
    sizes, decayed = zip(*items, strict=True)
    layout = flat_layout(sizes, decayed, multiple)
    assert layout.size % multiple == 0
    assert layout.used <= layout.size < layout.used + multiple


def test_a_flag_for_each_size_is_required():
    with pytest.raises(ValueError, match="zip"):
        flat_layout([1, 2], [True])
