"""The rotation of blocks before they are rounded: its matrix, error bounds, sums, residuals."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.torch_blockwise import TorchKernels, _rotate, _transform
from frontier_llm.geometry.formats import Format
from tests.collectives.test_blockwise import (
    ROUNDING,
    UNDERFLOW,
    drawn,
    dtypes,
    empty,
    lengths,
    native,
    needs_compiler,
    rotated_codes,
    round_trip,
)

BOTH = pytest.mark.parametrize(
    "kernels", [TorchKernels, pytest.param(native, marks=needs_compiler)]
)


def blocks_of(values: torch.Tensor, code: Format) -> list[torch.Tensor]:
    return list(values.split(code.block_elements)) if values.numel() else []


def rotated_by_hand(block: torch.Tensor, run: int) -> torch.Tensor:
    """Rotate the full runs of a block in fp64, with the matrix itself."""
    index = torch.arange(run)
    common = index[:, None] & index
    bits = sum((common >> bit) & 1 for bit in range(run.bit_length()))
    matrix = (1.0 - 2.0 * (bits % 2)).double() / math.sqrt(run)
    full = len(block) // run * run
    rotated = (block[:full].double().view(-1, run) @ matrix).flatten()
    return torch.cat((rotated, block[full:].double()))


@pytest.mark.parametrize("run", [16, 32, 256, 1024])
def test_the_transform_is_the_walsh_hadamard_matrix(run):
    code, values = Format("int4", 1024, rotation_elements=run), drawn(1024 + 700, run)
    for block in blocks_of(values, code):
        mine = _rotate(block[None], code)[0]
        error = (mine.double() - rotated_by_hand(block, run)).norm()
        assert error <= 2**-24 * (math.log2(run) + 2) * block.double().norm()


def test_sums_of_integers_are_exact_in_any_order():
    """The largest sum is that of 8192 values of 127, so the way back is rounded once."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-127, 128, (3, 8192), generator=generator)
    integers[0] = 127
    integers[1] = torch.where(integers[1] < 0, -127, 127)
    in_fp32, in_fp64 = (_transform(integers.to(t), 8192) for t in (torch.float32, torch.float64))
    assert in_fp32.double().equal(in_fp64)
    assert in_fp32.abs().max() == 127 * 8192 < 2**24


@pytest.mark.parametrize(("block", "run"), [(96, 32), (64, 24), (64, 8), (64, 128)])
def test_runs_that_kernels_cannot_rotate_are_rejected(block, run):
    with pytest.raises(AssertionError):
        Format("int4", block, rotation_elements=run)


@BOTH
@given(lengths, rotated_codes, dtypes, st.integers(0, 2**32 - 1))
def test_the_norm_of_a_blocks_error_is_bounded_as_without_rotation(
    kernels, length, code, dtype, seed
):
    """Errors of three kinds add up, all as norms: a rotation does not change a norm.

    Integers: as without rotation, at most half a step or one step each. fp32: a rotation rounds
    once per stage (9 at most) and once for its factor, at most 2**-24 of the norm each time; the
    block is rotated and what is decoded is rotated back, and four more roundings as in
    test_blockwise: less than 2**-19 of the norms of both. Output: what is decoded is rounded once.
    A single rotated value has the error of the norm, which is up to sqrt(run) times the value.
    """
    values = drawn(length, seed % 1000, dtype)
    scales, _, out = round_trip(values, code, seed=seed, kernels=kernels())
    step = 1.0 if code.is_stochastic else 0.5
    of_scale = 2**-24 * 13 * math.sqrt(code.rotation_elements)
    found = zip(blocks_of(values, code), blocks_of(out, code), scales.tolist(), strict=True)
    for block, decoded, scale in found:
        error = (decoded.double() - block.double()).norm()
        of_integers = scale * step * math.sqrt(len(block))
        norm = block.double().norm() + of_integers  # of what is decoded, at most
        rounded = ROUNDING[dtype] * norm + UNDERFLOW * math.sqrt(len(block))
        assert error <= of_integers + 2**-19 * 2 * norm + rounded
        largest = rotated_by_hand(block, code.rotation_elements).abs().max().item() / code.largest
        most = 1.0 if code.scale_bytes == 4 else 1 + 2**-7
        assert largest * (1 - of_scale) <= scale <= largest * (1 + of_scale) * most


@BOTH
@pytest.mark.parametrize("run", [64, 256])
def test_heavy_tails_lose_less_in_4_bits(kernels, run):
    """Of 200 blocks each has one outlier, 30 times as large as the other values."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(200, 256, generator=generator)
    outliers = torch.randint(0, 256, (200,), generator=generator)
    values[torch.arange(200), outliers] *= 30 / values[torch.arange(200), outliers].abs()
    plain = Format("int4", 256, 2)
    errors = [
        (round_trip(values.flatten(), code, kernels=kernels())[2] - values.flatten())
        .square()
        .mean()
        for code in (plain, replace(plain, rotation_elements=run))
    ]
    # without rotation, s = 30 / 7 is so large that most of the other values are rounded to 0
    assert errors[0] > 0.8
    assert errors[1] < errors[0] * (0.15 if run == 64 else 0.06)


@BOTH
def test_one_outlier_is_spread_by_the_root_of_the_run(kernels):
    values = torch.zeros(256)
    values[77] = 112.0
    code = Format("int4", 256, rotation_elements=256)
    scales, packed, out = round_trip(values, code, kernels=kernels())
    assert scales.item() == pytest.approx(112 / 7 / 16, rel=1e-6)
    assert packed[:128].ne(0).all()
    torch.testing.assert_close(out, values, rtol=1e-6, atol=1e-5)


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [70, 118], ids=["in a run", "after the last full run"])
def test_a_non_finite_value_makes_only_its_block_non_finite(kernels, at, bad):
    code, values = Format("int4", 64, rotation_elements=32), drawn(64 + 32 + 25, 1)
    values[at] = bad
    residual = torch.zeros(121, dtype=torch.bfloat16)
    _, _, out = round_trip(values, code, residual, kernels=kernels())
    assert not out[64:].isfinite().any()
    assert out[:64].isfinite().all()
    assert residual.isfinite().all()


@BOTH
def test_finite_values_whose_sum_is_infinite_make_the_block_non_finite(kernels):
    values = torch.full((64,), 3e38)
    _, _, out = round_trip(values, Format("int8", 64, rotation_elements=16), kernels=kernels())
    assert not out.isfinite().any()


@BOTH
@given(lengths, rotated_codes)
def test_zeros_and_tiny_numbers_become_zero(kernels, length, code):
    for values in (torch.zeros(length), torch.full((length,), 1e-44)):
        _, packed, out = round_trip(values, code, kernels=kernels())
        assert not out.any()
        assert not packed.any()


@BOTH
@given(lengths, rotated_codes, dtypes, st.integers(0, 1000))
def test_the_residual_is_the_error_of_what_is_decoded(kernels, length, code, dtype, seed):
    values, old = drawn(length, seed, dtype), drawn(length, seed + 1).bfloat16() * 0.01
    slots, residual, decoded = empty(code, 1, length, length), old.clone(), torch.empty(1, length)
    kernels().quantise(values[None], slots, Residual(residual[None]), seed)
    kernels().dequantise(slots, decoded)
    assert residual.equal((values.float() + old.float() - decoded[0]).bfloat16())


@BOTH
@given(lengths, rotated_codes, st.integers(0, 3), st.data())
def test_sums_are_rotated_back_once(kernels, elements, code, skip, data):
    """The sum has the bits of the documented order, and is close to that of decoded messages.

    With m the sum of the largest values of all summands, a run of n of them has a norm of at most
    sqrt(n) m, and its integers at most sqrt(n) m / 7 more each: together sqrt(n) m (1 + sqrt(n) /
    7) < 96 m for n = 512. fp32 rounds this at most 13 times in a rotation, for the sum and for the
    messages: 2 * 13 * 96 * 2**-24 < 2**-12.
    """
    border = data.draw(st.integers(0, elements))
    unrotated = replace(code, rotation_elements=0)
    tables, sums, decoded = [], torch.zeros(elements), drawn(elements, 5).double()
    for rank in range(4):
        slots, out = empty(code, 1, elements, border), torch.empty(1, elements)
        kernels().quantise(drawn(elements, rank)[None], slots, seed=rank)
        tables.append(slots.data)
        if rank != skip:
            kernels().dequantise(slots, out)
            decoded += out[0].double()
            kernels().dequantise(replace(slots, fmt=unrotated), out)
            sums += out[0]
    total, by_hand = drawn(elements, 5), drawn(elements, 5)
    kernels().add_up(replace(slots, data=torch.cat(tables)), total, skip)
    for block, sum_ in zip(
        blocks_of(by_hand[:border], code), blocks_of(sums[:border], code), strict=True
    ):
        block += _rotate(sum_[None], code)[0]
    assert total[:border].equal(by_hand[:border])
    largest = sum(drawn(elements, rank).abs().max() for rank in range(6)) if elements else 0.0
    torch.testing.assert_close(total.double(), decoded, rtol=0, atol=2**-12 * float(largest))


def test_stochastic_rounding_is_right_on_average():
    code = Format("int4", 64, is_stochastic=True, rotation_elements=32)
    values = drawn(64, 3)
    trips = [round_trip(values, code, seed=seed) for seed in range(500)]
    mean = torch.stack([out for _, _, out in trips]).mean(0)
    assert ((mean - values).abs() < 0.12 * trips[0][0].item()).all()  # 5 standard deviations
