"""Rotary positions give the bits of megatron's function, in values and gradients."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from frontier_llm.device.kernels import TORCH
from frontier_llm.model.rotary import rms_norm, rotate

TOKENS, SAMPLES, HEADS, GROUPS, WIDTH = 6, 2, 4, 2, 8
MEGATRON = SimpleNamespace(
    apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
)


def megatrons(
    query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    group = SimpleNamespace(size=lambda: 1)
    query, key = (apply_rotary_pos_emb(x, angles, MEGATRON, cp_group=group) for x in (query, key))
    return query, key


@pytest.mark.parametrize("rotated", [WIDTH, WIDTH // 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_megatron(rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    half = torch.randn(TOKENS, 1, 1, rotated // 2)
    angles = torch.cat((half, half), dim=-1)
    shapes = [(TOKENS, SAMPLES, heads, WIDTH) for heads in (HEADS, GROUPS)]
    values, weights = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
    results = []
    for function in (rotate, megatrons):
        leaves = [value.clone().requires_grad_() for value in values]
        outputs = function(*leaves, angles)
        torch.autograd.backward(outputs, weights)
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    assert not results[0][0].equal(values[0])
    for ours, expected in zip(*results, strict=True):
        assert ours.equal(expected)
        assert ours.dtype == dtype


def test_zero_centred_norms_round_neither_their_factors_nor_products() -> None:
    """In bf16, 1 + weight of small weights would be 1."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, WIDTH).bfloat16(), 3e-3 * torch.rand(WIDTH).bfloat16()
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    ours = rms_norm(TORCH, *leaves, 1e-6, centred=True)
    plain = [t.double().requires_grad_() for t in (x, weight)]
    scaled = plain[0] * (plain[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = scaled * (1 + plain[1])
    assert torch.equal(ours, expected.bfloat16())
    assert not torch.equal(ours, scaled.bfloat16())
    for out in (ours, expected):
        out.backward(torch.ones_like(out))
    for found, wanted in zip(leaves, plain, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-2, atol=1e-2)
