"""Messages of differences: what is subtracted and added, what is not, and repeated refreshes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.collectives.torch_blockwise import TorchKernels
from frontier_llm.geometry.formats import Format
from tests.collectives.test_blockwise import ROUNDING, all_codes, drawn, dtypes, empty, lengths
from tests.collectives.test_rotation import BOTH


@BOTH
@given(lengths, all_codes, dtypes, dtypes, st.data())
def test_a_difference_is_quantised_and_added_to_old_values(
    kernels, elements, code, dtype, held_dtype, data
):
    """The same as quantising the difference, decoding it, and adding it in fp32."""
    border = data.draw(st.integers(0, 2 * elements))
    parts, base = drawn(2 * elements, 1, dtype), drawn(2 * elements, 2, held_dtype)
    parts, base, held = parts.view(2, -1), base.view(2, -1), drawn(2 * elements, 3, held_dtype)
    held, old = held.view(2, -1), held.clone().view(2, -1)
    slots = empty(code, 2, elements, border)
    kernels().quantise(parts, slots, seed=5, base=base)
    kernels().dequantise(slots, held, add=True)
    plain = empty(code, 2, elements, border)
    difference, decoded = parts.float() - base.float(), torch.empty(2, elements)
    kernels().quantise(difference, plain, seed=5)
    kernels().dequantise(plain, decoded)
    for part in range(2):
        count = max(0, min(border - part * elements, elements))
        _, _, (_, scales, packed) = slots.sections(part)
        _, _, (_, expected_scales, expected) = plain.sections(part)
        assert scales.equal(expected_scales)
        assert packed.equal(expected)
        added = (old[part].float() + decoded[part]).to(held_dtype)
        assert held[part, :count].equal(added[:count])
        sent_as_values = parts[part, count:].bfloat16().to(held_dtype)
        assert held[part, count:].equal(sent_as_values), "elements that are not quantised"


@BOTH
@pytest.mark.parametrize("code", [Format("int4", 64, 2), Format("int4", 64, 2, True, 64)])
def test_refreshes_in_differences_follow_the_master_weights(kernels, code):
    """All ranks hold the same bits after each refresh, and errors do not add up.

    Three ranks own a part each of weights that they hold in bf16. An owner sends the difference of
    its fp32 master weights and of the bf16 weights, and decodes its own slot like all others.
    """
    ranks, elements, border = 3, 150, 2 * 150 + 70
    generator = torch.Generator().manual_seed(0)
    masters = 0.1 * torch.randn(ranks, elements, generator=generator)
    held = [masters.bfloat16() for _ in range(ranks)]
    for step in range(40):
        masters += 1e-3 * torch.randn(masters.shape, generator=generator)
        slots = empty(code, ranks, elements, border)
        before = held[0].clone()
        for rank in range(ranks):
            own = slice(rank, rank + 1)
            seed = 100 * step + rank
            kernels().quantise(masters[own], slots.only(rank), seed=seed, base=held[rank][own])
        for weights in held:
            kernels().dequantise(slots, weights, add=True)
        assert held[1].equal(held[0])
        assert held[2].equal(held[0])
        largest = (masters - before.float()).abs().max()
        bound = largest / 7 * 1.01 * (1.0 if code.is_stochastic else 0.5)
        if code.rotation_elements:
            bound *= code.rotation_elements  # by the norm of a run's error, and of its values
        rounding = ROUNDING[torch.bfloat16] * (masters.abs() + bound)
        assert ((held[0].float() - masters).abs() <= bound + rounding).all()
    assert largest < 0.01, "the differences stay as small as a step and the rounding to bf16"
    values = empty(replace(code, rotation_elements=0), ranks, elements, border)
    sent = torch.empty_like(held[0])
    kernels().quantise(masters, values)
    kernels().dequantise(values, sent)
    errors = [(weights.float() - masters)[:2].square().mean() for weights in (held[0], sent)]
    assert errors[0] < 0.05 * errors[1], "weights in int4 lose far more than their differences"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_difference_that_is_not_finite_makes_its_block_non_finite(bad):
    parts, base, held = drawn(64, 1)[None], drawn(64, 2)[None], drawn(64, 3)[None]
    parts[0, 40] = bad
    slots = empty(Format("int4", 32), 1, 64, 64)
    TorchKernels().quantise(parts, slots, base=base)
    TorchKernels().dequantise(slots, held, add=True)
    assert held[0, :32].isfinite().all()
    assert not held[0, 32:].isfinite().any()
