"""Products that are added to a sum of another dtype, against torch's product in fp64."""

import pytest
import torch

from frontier_llm.device.accumulate import accumulate_product

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_replaces_the_sum_or_is_added(
    device: str, dtype: torch.dtype, sum_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((16, 24), (16, 8))
    )
    exact = left.double().t() @ right.double()
    # undefined contents, at a place in a flat buffer
    total = torch.full((24 * 8 + 5,), torch.nan, device=device, dtype=sum_dtype)[5:].view(24, 8)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(sum_dtype).eps)
    if device == "cuda" and sum_dtype == torch.float32:
        rounding = 1e-6  # the products are added without being rounded to 16 bits
    for times in (1, 2, 3):
        accumulate_product(total, left.t(), right, add=times > 1)
        assert total.dtype == sum_dtype
        error = (total.double() - times * exact).norm() / exact.norm()
        assert error < 8 * rounding
