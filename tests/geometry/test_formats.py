"""Bytes of messages, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.cli.compose import compose
from frontier_llm.config.collectives import CollectivesConfig
from frontier_llm.geometry.formats import BF16, FP32, Format, StateFormats

INT8, INT4 = Format("int8", 512, 2), Format("int4", 512, 2)


@pytest.mark.parametrize(
    ("code", "elements", "quantised", "wanted"),
    [
        (INT8, 1024, 1024, 16 + 1024),  # 2 scales, padded to 16 bytes
        (INT4, 1024, 1024, 16 + 512),
        (INT4, 1025, 1025, 16 + 528),  # 513 bytes, padded to a multiple of 16
        (INT4, 1024 + 300, 1024 + 300, 16 + 512 + 256),  # a block shares a byte between its halves
        (INT8, 1024, 1000, 16 + 2 * 24 + 1008),
        (INT4, 7, 0, 16),  # seven small ones
        (BF16, 10, 0, 32),
        (INT8, 0, 0, 0),
        (INT8, 1, 1, 32),
    ],
)
def test_a_slot_by_hand(code, elements, quantised, wanted):
    assert code.slot(elements, quantised).stop == wanted


@given(st.sampled_from([INT8, INT4, BF16]), st.integers(0, 3000), st.integers(1, 9), st.data())
def test_all_slots_are_as_long_as_the_longest(code, elements, parts, data):
    border = data.draw(st.integers(0, elements * parts))
    needed = [
        code.slot(elements, code.quantised_of(border, part * elements, elements)).stop
        for part in range(parts)
    ]
    assert code.slot_bytes(elements, parts, border) == max(needed)
    assert max(needed) % 16 == 0


def test_int4_with_its_scales_is_a_quarter_of_bf16_within_a_percent():
    assert INT4.element_bytes == pytest.approx(0.5, rel=0.01)
    assert INT4.slot(1_000_000, 1_000_000).stop / 2_000_000 == pytest.approx(0.25, rel=0.01)


def test_nothing_is_made_wider():
    assert FP32.is_lossless(2)
    assert FP32.is_lossless(4)
    assert BF16.is_lossless(2)
    assert not BF16.is_lossless(4)
    assert not INT8.is_lossless(2)


def config(*overrides: str) -> CollectivesConfig:
    return CollectivesConfig.model_validate(compose(overrides)["collectives"])


def test_the_presets_formats():
    formats = StateFormats.at(config("collectives=zeropp"))
    assert [one.name for one in (formats.params, formats.params_backward, formats.refresh)] == [
        "int8"
    ] * 3
    assert [one.name for one in formats.grads] == ["int8", "int8", "int4"]
    assert [one.name for one in formats.sums] == ["fp32"] * 3


def test_formats_of_levels_replace_those_of_gradients_and_sums():
    formats = StateFormats.at(
        config("collectives=zeropp", "collectives.formats={package: bf16, network: int8}")
    )
    assert [one.name for one in formats.grads] == ["bf16", "int8", "int8"]
    assert [one.name for one in formats.sums] == ["bf16", "fp32", "int8"]
    assert formats.params.name == "int8"
    assert formats.encodes_sums


def test_plain_has_one_format_for_all_links():
    formats = StateFormats.at(config("collectives.grads_format=bf16"))
    assert [one.name for one in formats.grads] == ["bf16"] * 3
    assert not formats.any_encoded(2)
    assert not formats.any_encoded(4)


def test_integers_end_with_until_step():
    chosen = config("collectives=zeropp", "collectives.until_step=7")
    assert StateFormats.at(chosen, 7) == StateFormats.at(config("collectives=zeropp"))
    after = StateFormats.at(chosen, 8)
    assert not after.any_encoded(4)
    assert {after.params.name, after.refresh.name, *(one.name for one in after.grads)} == {"fp32"}
