"""Check GELU, whose backward pass overwrites the gradient of its result."""

import pytest
import torch
from torch.nn import functional as F

from frontier_llm.model.transformer import gelu_tanh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch_and_reuses_the_gradient(dtype: torch.dtype) -> None:
    x = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    grad = torch.randn(64, 32, dtype=dtype)
    expected = F.gelu(x, approximate="tanh")
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    output = gelu_tanh(x)
    assert torch.equal(output, expected)
    (found,) = torch.autograd.grad(output, x, grad)
    assert torch.equal(found, expected_grad)
    assert found.data_ptr() == grad.data_ptr()
