"""The GPU's kernels of FlexAttention: their numbers, their machine code, and the stored tensors."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu_model import fake_cuda

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fake_cuda.PRELOADED, reason="run `make test-gpu-model`"),
]
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx90a": 64 << 10, "gfx942": 64 << 10}
"""Shared memory that one group of threads can have."""


def run(command: str, argument: str, **variables: str) -> Any:
    """Run tests/gpu_model/flex_kernels.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_model.flex_kernels", command, argument],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["causal", "padded"])
def test_the_kernels_give_the_numbers_of_attention_written_out(case: str) -> None:
    """In Triton's interpreter, in fp32; `bias` is the gradient of the relative positions."""
    differences = run("compare", case, TRITON_INTERPRET="1")
    assert set(differences) == {"output", "query", "key", "value", "bias"}
    assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize("chip", SHARED_BYTES)
def test_the_kernels_compile_for_a_chip(chip: str) -> None:
    kernels = run("compile", chip)
    assert len(kernels) == 4  # forward and backward, of the encoder and of the decoder
    assert [kernel["atomic"] for kernel in kernels] == [False, True] * 2
    assert all(kernel["shared"] <= SHARED_BYTES[chip] for kernel in kernels), kernels
    assert all(kernel["spilled"] <= 1024 for kernel in kernels), kernels


def recorded(attention: str, layers: int) -> fake_cuda.Recorded:
    """Record a step of mT5-XL with 1,000 tokens, a number that no width of the model equals."""
    return fake_cuda.record_step(
        ["model=mt5_xl", f"model.layers={layers}", "data=stdlib_spans", "parallel.pipeline=1",
         "data.sequence_length=1000", "data.micro_batch=4", "data.global_batch=4",
         f"attention={attention}"],
        1, 0,
    )  # fmt: skip


def test_no_tensor_has_a_number_per_query_and_key() -> None:
    found = {
        attention: [shape for shape in recorded(attention, 2).shapes if shape[-2:] == (1000, 1000)]
        for attention in ("sdpa", "flex")
    }
    assert (4, 32, 1000, 1000) in found["sdpa"]
    assert found["flex"] == []


def test_a_layer_moves_fewer_bytes() -> None:
    """Of one encoder and one decoder layer, without matrix products."""
    moved = {}
    for attention in ("sdpa", "flex"):
        sizes = recorded(attention, 4).kernel_bytes - recorded(attention, 2).kernel_bytes
        moved[attention] = sum(size for name, size in sizes.items() if "mm" not in name)
    assert moved["flex"] < 0.65 * moved["sdpa"]
