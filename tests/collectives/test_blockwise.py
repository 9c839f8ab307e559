"""Block quantisation: error bounds, odd lengths, non-finite values, equal bits of all kernels."""

import functools
import importlib.util
import itertools
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.collectives import native_blockwise
from frontier_llm.collectives.kernel_choice import choose_kernels, verify
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Slots
from frontier_llm.collectives.torch_blockwise import TorchKernels
from frontier_llm.geometry.formats import Format
from tests.properties import examples

CPU = torch.device("cpu")
native = functools.cache(native_blockwise.load)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, native_blockwise.COMPILERS)), reason="no C compiler here"
)
codes = st.builds(
    Format,
    name=st.sampled_from(["int8", "int4"]),
    block_elements=st.sampled_from([32, 64, 160]),
    scale_bytes=st.sampled_from([2, 4]),
    is_stochastic=st.booleans(),
)
rotated_codes = st.builds(
    lambda code, shape: replace(code, block_elements=shape[0], rotation_elements=shape[1]),
    codes,
    st.sampled_from([(32, 16), (32, 32), (64, 32), (160, 16), (128, 128), (256, 64), (512, 512)]),
)
all_codes = st.one_of(codes, rotated_codes)
lengths = st.one_of(st.integers(0, 5), st.integers(0, 500))
feedbacks = st.sampled_from([None, 0, 2, 4])
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of rounding a number to the nearest one of a type."""
UNDERFLOW = 2**-25
"""Largest error of rounding a number that is too small for that: half of fp16's smallest one."""
dtypes = st.sampled_from(list(ROUNDING))


def drawn(length: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of very different magnitudes, within a block and between blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator)
    return (values * torch.exp(2 * torch.randn(length, generator=generator))).to(dtype)


def empty(code: Format, parts: int, elements: int, border: int, small=torch.bfloat16) -> Slots:
    """Return slots that are full of zeros, on the CPU, with bytes between them."""
    size = code.slot_bytes(elements, parts, border) if elements else 0
    return Slots(torch.zeros(parts, size + 16, dtype=torch.uint8), code, elements, border, small)


def round_trip(values, code, residual=None, seed=0, kernels=None):
    """Quantise all values as one part; return scales, packed integers, dequantised values."""
    kernels, slots = kernels or TorchKernels(), empty(code, 1, values.numel(), values.numel())
    kept = None if residual is None else Residual(residual[None])
    kernels.quantise(values[None], slots, kept, seed)
    out = torch.full_like(values, 77.0)
    kernels.dequantise(slots, out[None])
    _, _, (_, scales, packed) = slots.sections(0)
    return scales, packed, out


@given(lengths, codes, dtypes, st.integers(0, 2**32 - 1))
def test_the_error_of_an_element_is_at_most_half_a_step(length, code, dtype, seed):
    values = drawn(length, seed % 1000, dtype)
    """Two errors add up: that of the integers, in steps, and that of rounding what is decoded.

    The integers are computed in fp32, with at most three roundings of numbers up to 128 steps and
    one of the product: less than 4 * 128 * 2**-24 = 2**-15 steps. What is rounded to the dtype is
    at most the value and the first error. A scale is computed with two roundings in fp32 (2**-22
    covers them), and is then rounded up to bf16.
    """
    values = drawn(length, seed % 1000, dtype)
    scales, _, out = round_trip(values, code, seed=seed)
    assert out.dtype == dtype
    steps = scales.double().repeat_interleave(code.block_elements)[:length]
    of_integers = steps * ((1.0 if code.is_stochastic else 0.5) + 2**-15)
    of_output = ROUNDING[dtype] * (values.double().abs() + of_integers) + UNDERFLOW
    assert ((out.double() - values.double()).abs() <= of_integers + of_output).all()
    for index, scale in enumerate(scales.tolist()):
        block = values[index * code.block_elements :][: code.block_elements]
        step = block.double().abs().max().item() / code.largest
        most = 1.0 if code.scale_bytes == 4 else 1 + 2**-7
        assert step * (1 - 2**-22) <= scale <= step * most * (1 + 2**-22)


def test_a_large_step_is_rounded_in_the_output_too():
    """The error of rounding to bf16 is relative to what is decoded, which is not the value."""
    code = Format("int4", 160, 4, is_stochastic=True)
    property_ = test_the_error_of_an_element_is_at_most_half_a_step.hypothesis.inner_test
    property_(321, code, torch.bfloat16, 231611)


@given(lengths, codes)
def test_zeros_stay_zero(length, code):
    _, packed, out = round_trip(torch.zeros(length), code)
    assert not out.any()
    assert not packed.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("kernels", [TorchKernels, pytest.param(native, marks=needs_compiler)])
def test_a_non_finite_value_makes_only_its_block_non_finite(kernels, name, bad):
    """A step with such a gradient is skipped, so it must not look finite to the receiver."""
    code, values = Format(name, 32), drawn(100, 1)
    values[40] = bad
    residual = torch.zeros(100, dtype=torch.bfloat16)
    _, _, out = round_trip(values, code, residual, kernels=kernels())
    assert not out[32:64].isfinite().any()
    assert out[:32].isfinite().all()
    assert out[64:].isfinite().all()
    assert residual.isfinite().all()


def test_tiny_numbers_become_zero_and_not_nan():
    values = torch.tensor([1e-45, -3e-39, 0.0] * 20)
    _, _, out = round_trip(values, Format("int8", 32))
    assert not out.any()


def test_stochastic_rounding_is_right_on_average_and_the_same_for_a_seed():
    code = Format("int4", 64, is_stochastic=True)
    values = drawn(64, 3)
    trips = [round_trip(values, code, seed=seed) for seed in range(500)]
    mean = torch.stack([out for _, _, out in trips]).mean(0)
    step = trips[0][0].item()
    assert ((mean - values).abs() < 0.12 * step).all()  # 5 standard deviations of the mean
    assert torch.equal(round_trip(values, code, seed=5)[1], trips[5][1])
    assert not torch.equal(trips[5][1], trips[6][1])


def test_error_feedback_corrects_a_sum():
    """A small number next to a large one, sent fifty times, arrives only with error feedback."""
    code, values = Format("int4", 32), torch.tensor([1.0, 0.04, -0.03] + [0.0] * 29)
    residual, kept, lost = torch.zeros(32, dtype=torch.bfloat16), torch.zeros(32), torch.zeros(32)
    for _ in range(50):
        kept += round_trip(values, code, residual)[2]
        lost += round_trip(values, code)[2]
    step = 1 / 7
    assert ((kept - 50 * values).abs() < step).all()
    assert (lost - 50 * values).abs().max() > 10 * step


@needs_compiler
@examples(200)  # the first one may compile
@given(lengths, all_codes, dtypes, feedbacks, st.integers(0, 2**32 - 1), st.data())
def test_native_kernels_make_the_same_bits(elements, code, dtype, feedback, seed, data):
    border = data.draw(st.integers(0, 3 * elements))
    skip = data.draw(st.sampled_from([None, 0, 1, 2]))
    case = (code, dtype, elements, border, feedback, seed, skip)
    compare(native(), *case, base_dtype=data.draw(st.one_of(st.none(), dtypes)))


def residual_of(parts, code, scale_bytes, seed) -> Residual:
    """Return a residual for parts, with random values and a decay."""
    values = drawn(parts.numel(), 5).view(parts.shape) * 0.01
    decay = (seed + code.block_elements) % 3 * 0.3
    if not scale_bytes:
        return Residual(values.bfloat16().to(parts.device), None, decay)
    dtype = torch.float32 if scale_bytes == 4 else torch.bfloat16
    made = Residual.zeros(*parts.shape, parts.device, code.block_elements, dtype, decay)
    made.values.copy_((values * 1000).clamp(-127, 127))
    made.scales.copy_(drawn(made.scales.numel(), 8).view(made.scales.shape).abs())
    return made


def compare(
    kernels, code, dtype, elements, border, feedback, seed, skip, device=CPU, base_dtype=None
) -> None:
    """Compare the bits that kernels and the reference write for a message of three parts.

    `feedback`: bytes per scale of a residual in int8; 0 for a residual in bf16; None for none.
    `base_dtype`: of the base of differences; None if the values themselves are sent.
    """
    values = drawn(3 * elements, seed % 977, dtype)
    if elements > 3:
        values[elements // 2], values[elements + elements // 2] = math.inf, math.nan
        if code.is_quantised and border:
            values[0] = 1e-39  # it is quantised: Triton's interpreter does not copy such numbers
    small = torch.float16 if dtype == torch.float16 else torch.bfloat16
    answers = []
    for one in (kernels, TorchKernels()):
        slots = empty(code, 3, elements, border, small)
        slots = replace(slots, data=slots.data.to(device))
        parts = values.to(device).view(3, elements)
        residual = None if feedback is None else residual_of(parts, code, feedback, seed)
        base = None
        if base_dtype is not None:
            base = drawn(parts.numel(), 7, base_dtype).to(device).view(3, elements)
        one.quantise(parts, slots, residual, seed, skip, base)
        out, total = torch.full_like(parts, 0.5), drawn(elements, 6).to(device)
        one.dequantise(slots, out, add=base is not None)
        same = replace(slots, data=slots.data[:1].repeat(3, 1))
        one.add_up(same, total, skip)
        sections = [slots.sections(i) for i in range(3)]
        written = [view for _, small, blocks in sections for view in (small, *blocks[1:])]
        kept = () if residual is None else (residual.values, residual.scales)
        answers.append((*written, *kept, out, total))
    for mine, expected in zip(*answers, strict=True):
        if expected is None:
            continue
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@given(lengths, codes, dtypes, st.integers(0, 3), st.data())
def test_parts_are_written_and_read_alone_as_in_a_message(elements, code, dtype, skip, data):
    """Every part has blocks and a seed of its own; elements after the border are copied."""
    border, values = data.draw(st.integers(0, 4 * elements)), drawn(4 * elements, elements, dtype)
    parts, kernels = values.view(4, elements), TorchKernels()
    slots = empty(code, 4, elements, border)
    kernels.quantise(parts, slots, seed=99, skip=skip)
    out = torch.full_like(parts, 77.0)
    kernels.dequantise(slots, out)
    written = [i for i in range(4) if i != skip]
    assert not slots.data[skip].any()
    for before, i in enumerate(written):
        count = max(0, min(border - i * elements, elements))
        seed = (99 + before * 0xC2B2AE3D) % 2**32
        assert torch.equal(out[i, :count], round_trip(parts[i, :count], code, seed=seed)[2])
        assert torch.equal(out[i, count:], parts[i, count:].bfloat16().to(dtype))


@given(lengths, codes, st.integers(0, 3), st.data())
def test_sums_over_ranks_add_what_each_rank_sent_in_order(elements, code, skip, data):
    border = data.draw(st.integers(0, elements))
    tables, outs = [], []
    for rank in range(4):
        slots, out = empty(code, 1, elements, border), torch.empty(1, elements)
        TorchKernels().quantise(drawn(elements, rank)[None], slots, seed=rank)
        TorchKernels().dequantise(slots, out)
        tables.append(slots.data)
        outs.append(out[0])
    total = drawn(elements, 5)
    TorchKernels().add_up(replace(slots, data=torch.cat(tables)), total, skip)
    by_hand = drawn(elements, 5)
    for rank, out in enumerate(outs):
        if rank != skip:
            by_hand += out
    assert total.equal(by_hand)


@needs_compiler
def test_fast_kernels_are_used_if_they_work_and_the_reason_is_given(monkeypatch, tmp_path):
    assert choose_kernels("auto", CPU).name == "native"
    assert choose_kernels("torch", CPU).name == "torch"
    monkeypatch.setattr(native_blockwise, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = choose_kernels("auto", CPU)
    assert refused.name == "torch"
    assert "no C compiler" in refused.reason


@needs_compiler
def test_native_kernels_are_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_blockwise.load()
    monkeypatch.setattr(native_blockwise, "COMPILERS", ())
    native_blockwise.load()


def test_kernels_with_a_wrong_bit_are_rejected(monkeypatch):
    class Wrong(TorchKernels):
        def dequantise(self, slots, parts, *, add=False):
            super().dequantise(slots, parts, add=add)
            parts[-1, -1] += 1e-6

    with pytest.raises(ValueError, match="differ from torch in int8"):
        verify(Wrong(), CPU)


SHAPES = (
    # block, elements per run, bytes of a scale, elements, border, part that is skipped
    (512, 0, 2, 1300, 2 * 1300 + 517, 0),
    (160, 0, 4, 333, 333 + 100, 2),
    (32, 0, 2, 1, 2, 1),
    (64, 0, 4, 64, 3 * 64, None),
    (256, 0, 2, 4096 + 512, 4096 + 512 + 4096 + 272, 1),
    (8192, 0, 2, 8192 + 16, 8192, None),
    (32, 32, 2, 333, 333 + 110, 1),
    (160, 16, 4, 352, 352 + 100, None),
    (256, 64, 2, 4096 + 512, 4096 + 512 + 4096 + 272, 0),
    (8192, 8192, 4, 8192 + 16, 8192 + 16, None),
)
"""Parts of one program and of several, with and without a border inside a part, blocks whose half
is a power of two or not, runs that are a block or a part of one, and lengths and borders that
vectors divide or not."""
TRITON_CASES = list(
    itertools.product(
        SHAPES, ("int8", "int4"), (False, True), (torch.float32, torch.bfloat16, torch.float16)
    )
)
COVERING = [case for index, case in enumerate(TRITON_CASES) if (index % 12 + index // 12) % 4 == 0]
"""A quarter of the cases, in which any two values of two different columns meet."""


def test_any_two_values_meet_in_the_interpreter():
    columns = [set(column) for column in zip(*TRITON_CASES, strict=True)]
    for one, other in itertools.combinations(range(len(columns)), 2):
        met = {(case[one], case[other]) for case in COVERING}
        assert met == set(itertools.product(columns[one], columns[other]))


def compare_triton(device: str, cases) -> None:
    """Compare the bits of Triton's kernels with those of the reference."""
    from frontier_llm.collectives.triton_blockwise import TritonKernels

    for (block, run, scale_bytes, elements, border, skip), name, stochastic, dtype in cases:
        code = Format(name, block, scale_bytes, stochastic, run)
        feedback = (6 - scale_bytes if run else 0) if stochastic else None
        case = (code, dtype, elements, border, feedback, 0xF2345678, skip)
        base_dtype = torch.bfloat16 if stochastic else None
        compare(TritonKernels(), *case, torch.device(device), base_dtype)
    compare(TritonKernels(), Format("bf16"), torch.float32, 100, 0, None, 0, None,
            device=torch.device(device))  # fmt: skip


@pytest.mark.gpu
def test_triton_kernels_make_the_same_bits():
    compare_triton("cuda", TRITON_CASES)


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_make_the_same_bits_in_its_interpreter():
    """Triton's interpreter needs no GPU, but must be chosen before Triton is imported."""
    work = "from tests.collectives import test_blockwise as t; t.compare_triton('cpu', t.COVERING)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", work], check=False, capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
