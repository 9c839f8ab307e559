"""Residuals in bf16 and in int8: their formula, their bounds, and what they correct."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.torch_blockwise import TorchKernels
from frontier_llm.geometry.formats import Format
from tests.collectives.test_blockwise import (
    CPU,
    ROUNDING,
    all_codes,
    drawn,
    dtypes,
    empty,
    feedbacks,
    lengths,
    residual_of,
)
from tests.collectives.test_rotation import BOTH
from tests.covering import covering


def values_of(residual: Residual, block: int) -> torch.Tensor:
    """Return a residual as [parts, m] fp32."""
    values = residual.values.float()
    if residual.scales is None:
        return values
    scales = residual.scales.float().repeat_interleave(block, 1)
    return values * scales[:, : values.shape[1]]


@BOTH
@given(lengths, all_codes, dtypes, feedbacks.filter(lambda one: one is not None), st.data())
def test_the_next_residual_is_a_moving_average_of_errors(
    kernels, elements, code, dtype, scale_bytes, data
):
    """It is rounded once; elements that are not quantised keep theirs.

    It is computed in fp32: at most six roundings of numbers that are at most the value, the old
    residual and what is lost (2**-21 covers them), and then rounded to bf16, or to integers in
    steps of a scale (2**-15 steps as in test_blockwise), which has its own two roundings.
    """
    border, seed = data.draw(st.integers(0, 2 * elements)), data.draw(st.integers(0, 2))
    parts = drawn(2 * elements, 1, dtype).view(2, -1)
    residual = residual_of(parts, code, scale_bytes, seed)
    old = values_of(residual, code.block_elements)
    slots, decoded = empty(code, 2, elements, border), torch.empty(2, elements)
    kernels().quantise(parts, slots, residual, seed)
    kernels().dequantise(slots, decoded)
    new = values_of(residual, code.block_elements).double()
    lost = (parts.float() + old).double() - decoded.double()
    expected = residual.decay * old.double() + (1 - residual.decay) * lost
    for part in range(2):
        count = max(0, min(border - part * elements, elements))
        for block in range(0, count, code.block_elements):
            mine = new[part, block : min(count, block + code.block_elements)]
            wanted = expected[part, block : block + len(mine)]
            here = (part, slice(block, block + len(mine)))
            sizes = parts[here].double().abs() + old[here].double().abs() + lost[here].abs()
            in_fp32 = 2**-21 * sizes
            stored = ROUNDING[torch.bfloat16] * (wanted.abs() + in_fp32)
            if residual.scales is not None:
                scale = residual.scales[part, block // code.block_elements].item()
                step, slack = wanted.abs().max().item() / 127, in_fp32.max().item() / 127
                most = 1.0 if scale_bytes == 4 else 1 + 2**-7
                assert (step - slack) * (1 - 2**-22) <= scale
                assert scale <= (step + slack) * (1 + 2**-22) * most
                stored = torch.full_like(wanted, (0.5 + 2**-15) * scale)
            assert ((mine - wanted).abs() <= in_fp32 + stored).all()
        if residual.scales is None:
            assert new[part, count:].equal(old[part, count:].double())


@BOTH
@pytest.mark.parametrize("decay", covering([0.0, 0.8], [0.0]))
@pytest.mark.parametrize("block_elements", [None, 32], ids=["bf16", "int8"])
def test_residuals_stay_small_and_correct_sums(kernels, block_elements, decay):
    """Bounds that follow from the rounding, over 300 messages of random values.

    If values are at most X and residuals at most E, what is quantised is at most X + E, and lost is
    at most (X + E) / 14. With the weight b of the old residual and the relative error r of its
    storage, the next residual is at most (b E + (1 - b) (X + E) / 14) (1 + r). From 0, residuals
    stay below the fixed point of this. The sum of what was lost is the last residual less the
    rounding of all residuals, divided by 1 - b.
    """
    code, messages, largest = Format("int4", 32), 300, 1.0
    stored = 1 / 254 if block_elements else 2**-8
    kept = (1 + stored) * (1 - decay) / 14
    bound = kept * largest / (1 - kept - (1 + stored) * decay) * 1.0001
    generator = torch.Generator().manual_seed(0)
    residual = Residual.zeros(1, 75, CPU, block_elements, decay=decay)
    sent, received, plain = torch.zeros(3, 75, dtype=torch.float64)
    slots, decoded = empty(code, 1, 75, 75), torch.empty(1, 75)
    for _ in range(messages):
        values = 0.3 + 0.7 * (2 * torch.rand(1, 75, generator=generator) - 1)
        values *= torch.tensor([1.0, 0.04, 0.02]).repeat(25)  # of which most are rounded to 0
        for kept_errors, total in ((residual, received), (None, plain)):
            kernels().quantise(values, slots, kept_errors)
            kernels().dequantise(slots, decoded)
            total += decoded[0]
        sent += values[0]
        assert values_of(residual, 32).abs().max() <= bound
    allowed = bound * (1 + messages * stored) / (1 - decay)
    assert (received - sent).abs().max() <= allowed < 1
    assert (plain - sent).abs().max() > 3


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("run", [0, 16])
def test_a_non_finite_block_loses_its_residual_and_no_other(kernels, run, bad):
    code, values = Format("int4", 32, rotation_elements=run), drawn(75, 1)[None]
    residual = residual_of(values, code, 4, 1)
    expected = replace(residual, values=residual.values.clone(), scales=residual.scales.clone())
    kernels().quantise(values, empty(code, 1, 75, 75), expected)
    values[0, 40] = bad
    kernels().quantise(values, empty(code, 1, 75, 75), residual)
    assert not residual.values[0, 32:64].any()
    assert residual.scales[0, 1] == 0
    for part in (slice(0, 32), slice(64, 75)):
        assert residual.values[0, part].equal(expected.values[0, part])


def test_a_reset_discards_the_errors():
    for block_elements in (None, 32):
        residual = Residual.zeros(2, 75, CPU, block_elements, torch.bfloat16, 0.5)
        fresh = torch.zeros(2, 75)
        TorchKernels().quantise(
            drawn(150, 1).view(2, 75), empty(Format("int4", 32), 2, 75, 150), residual
        )
        assert not values_of(residual, 32).equal(fresh)
        residual.reset()
        assert values_of(residual, 32).equal(fresh)
        assert residual.scales is None or not residual.scales.any()


def test_bytes_and_views():
    in_bf16, in_int8 = Residual.zeros(3, 75, CPU), Residual.zeros(3, 75, CPU, 32)
    assert (in_bf16.nbytes, in_int8.nbytes) == (3 * 75 * 2, 3 * (75 + 3 * 4))
    in_int8.only(1).values.fill_(3)
    in_int8.only(1).scales.fill_(2.0)
    assert values_of(in_int8, 32).sum(1).tolist() == [0, 75 * 6, 0]


def test_residuals_of_other_shapes_or_blocks_are_rejected():
    parts, slots = torch.zeros(2, 75), empty(Format("int4", 32), 2, 75, 150)
    for residual in (Residual.zeros(2, 74, CPU), Residual.zeros(2, 75, CPU, 64)):
        with pytest.raises(AssertionError):
            TorchKernels().quantise(parts, slots, residual)
