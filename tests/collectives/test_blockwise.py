"""Block quantisation: error bounds, odd lengths, non-finite values, equal bits of all kernels."""

import functools
import importlib.util
import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.collectives import native_blockwise
from frontier_llm.collectives.blockwise import TorchKernels
from frontier_llm.collectives.kernel_choice import choose_kernels, verify
from frontier_llm.geometry.formats import Format

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
lengths = st.one_of(st.integers(0, 5), st.integers(0, 500))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def drawn(length: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of very different magnitudes, within a block and between blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator)
    return (values * torch.exp(2 * torch.randn(length, generator=generator))).to(dtype)


def empty(code: Format, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    slot = code.slot(length, length)
    scale_dtype = torch.float32 if code.scale_bytes == 4 else torch.bfloat16
    blocks = -(-length // code.block_elements)
    packed = torch.zeros(slot.stop - slot.values, dtype=torch.uint8)
    return torch.zeros(blocks, dtype=scale_dtype), packed


def round_trip(values, code, residual=None, seed=0, kernels=None):
    scales, packed = empty(code, values.numel())
    kernels = kernels or TorchKernels()
    kernels.quantise(values, code, scales, packed, residual, seed)
    out = torch.full_like(values, 77.0)
    kernels.dequantise(scales, packed, code, out)
    return scales, packed, out


@settings(deadline=None)
@given(lengths, codes, dtypes, st.integers(0, 2**32 - 1))
def test_the_error_of_an_element_is_at_most_half_a_step(length, code, dtype, seed):
    values = drawn(length, seed % 1000, dtype)
    scales, _, out = round_trip(values, code, seed=seed)
    assert out.dtype == dtype
    steps = scales.float().repeat_interleave(code.block_elements)[:length]
    allowed = steps * (1.0 if code.is_stochastic else 0.5)
    rounding = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    error = (out.double() - values.double()).abs()
    assert (error <= allowed * 1.0001 + values.double().abs() * 2 * rounding + 1e-7).all()
    for index, scale in enumerate(scales.tolist()):
        block = values[index * code.block_elements :][: code.block_elements]
        largest = block.float().abs().max().item()
        most = 1.0 if code.scale_bytes == 4 else 1 + 2**-7
        assert largest / code.largest * 0.9999999 <= scale <= largest / code.largest * most * 1.001


@settings(deadline=None)
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
@settings(max_examples=200, deadline=None)  # the first one may compile
@given(lengths, codes, dtypes, st.booleans(), st.integers(0, 2**32 - 1))
def test_native_kernels_make_the_same_bits(length, code, dtype, feedback, seed):
    values = drawn(length, seed % 977, dtype)
    if length > 3:
        values[length // 2] = (math.inf, math.nan, 1e-39, 3.0)[seed % 4]
    answers = []
    for kernels in (native(), TorchKernels()):
        residual = drawn(length, 5).bfloat16() * 0.01 if feedback else None
        scales, packed = empty(code, length)
        kernels.quantise(values, code, scales, packed, residual, seed)
        out = torch.full((length,), 0.5, dtype=dtype)
        kernels.dequantise(scales, packed, code, out)
        answers.append((scales, packed, out, values if residual is None else residual))
    for mine, expected in zip(*answers, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@settings(deadline=None)
@given(lengths, codes, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_sums_over_ranks_are_the_same_bits(length, code, skip, seed):
    """Rows have a stride, as in slots: other bytes lie between the values of two ranks."""
    slots = [round_trip(drawn(length, seed % 977 + rank), code) for rank in range(3)]
    tables = []
    for column in (0, 1):
        rows = torch.stack([slot[column] for slot in slots])
        wider = torch.full((3, rows.shape[1] + 8), 3, dtype=rows.dtype)
        wider[:, 4:-4] = rows
        tables.append(wider[:, 4:-4])
    totals = []
    for kernels in (native(), TorchKernels()):
        total = drawn(length, 5)
        kernels.add_up(*tables, code, total, skip)
        totals.append(total)
    by_hand = drawn(length, 5)
    for rank, slot in enumerate(slots):
        if rank != skip:
            by_hand += slot[2]
    assert totals[0].equal(totals[1])
    assert totals[1].equal(by_hand)


@needs_compiler
def test_fast_kernels_are_used_if_they_work_and_the_reason_is_given(monkeypatch, tmp_path):
    assert choose_kernels("auto", CPU).name == "native"
    assert choose_kernels("torch", CPU).name == "torch"
    monkeypatch.setattr(native_blockwise, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = choose_kernels("auto", CPU)
    assert refused.name == "torch"
    assert "no C compiler" in refused.reason


def test_kernels_with_a_wrong_bit_are_rejected(monkeypatch):
    class Wrong(TorchKernels):
        def dequantise(self, scales, packed, fmt, out):
            super().dequantise(scales, packed, fmt, out)
            out[-1] += 1e-6

    with pytest.raises(ValueError, match="differ from torch in int8"):
        verify(Wrong(), CPU)


def compare_triton(device: str) -> None:
    """Compare the bits of Triton's kernels with torch's."""
    from frontier_llm.collectives.triton_blockwise import TritonKernels

    for name, stochastic, dtype, (block, scale_bytes, length) in itertools.product(
        ("int8", "int4"),
        (False, True),
        (torch.float32, torch.bfloat16, torch.float16),
        ((512, 2, 1300), (160, 4, 333), (32, 2, 1), (64, 4, 64)),
    ):
        code = Format(name, block, scale_bytes, stochastic)
        values = drawn(length, 1, dtype).to(device)
        if length > 100:
            values[50], values[170] = math.inf, math.nan
        answers = []
        for kernels in (TritonKernels(), TorchKernels()):
            residual = drawn(length, 2).bfloat16().to(device)
            scales, packed = (one.to(device) for one in empty(code, length))
            kernels.quantise(values, code, scales, packed, residual, 0xF2345678)
            narrow, total = torch.empty_like(residual), torch.ones(length, device=device)
            kernels.dequantise(scales, packed, code, narrow)
            kernels.add_up(scales.repeat(3, 1), packed.repeat(3, 1), code, total, skip=1)
            answers.append((scales, packed, residual, narrow, total))
        for mine, expected in zip(*answers, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_triton_kernels_make_the_same_bits():
    compare_triton("cuda")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_make_the_same_bits_in_its_interpreter():
    """Triton's interpreter needs no GPU, but must be chosen before Triton is imported."""
    work = "from tests.collectives.test_blockwise import compare_triton; compare_triton('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", work], check=False, capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
