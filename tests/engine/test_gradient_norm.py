"""The norm by which gradients are clipped."""

import pytest
import torch

from frontier_llm.sharding.sharded_states import NORM_PIECE, squared_norm


@pytest.mark.parametrize("sizes", [(1,), (NORM_PIECE - 1, NORM_PIECE + 1, 7), (10_000_019, 3)])
def test_many_elements_lose_no_digits_of_the_norm(sizes: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, generator=random) * 1e-3 for size in sizes]
    exact = sum(float(part.double().square().sum()) for part in parts)
    assert squared_norm(parts).item() == pytest.approx(exact, rel=1e-6)
