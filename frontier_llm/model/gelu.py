"""GELU in its tanh form, whose backward pass allocates nothing."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form (arXiv:1606.08415, section 2).

    The result may have only one reader, such as a linear layer, because the backward pass
    overwrites the gradient of the result.
    """
    if torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    output: Tensor = _GeluTanh.apply(x)
    return output


class _GeluTanh(torch.autograd.Function):
    """GELU whose backward pass needs no further tensor.

    This matters while weight gradients wait: the output of GELU is then kept as a factor, and
    another tensor of its size would add to the peak memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,), (x,) = grads, ctx.saved_tensors
        return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)
