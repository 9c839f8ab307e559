"""Rotary positions give the bits of megatron's function, in values and gradients."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from frontier_llm.model.rotary import rotate

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
