"""Add matrix products to a sum in fp32, as for the gradients of weights.

A GPU multiplies bf16 or fp16 and adds to fp32 in one kernel. On other devices a product in bf16 is
rounded to bf16 and then added.
"""

from functools import cache

import torch


def accumulate_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, add: bool
) -> None:
    """Compute `total = left @ right`, or `total += left @ right`, without a temporary tensor.

    If the device has no kernel for these dtypes, the product is a temporary tensor in the dtype of
    the operands, which is then copied or added. The sum is [m, n], usually fp32. The operands are
    [m, k] and [k, n], both in fp32, bf16 or fp16. Unless the product is added, the contents of
    `total` may be undefined.
    """
    beta = int(add)
    if total.dtype == right.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.dtype == torch.float32 and accumulates_in_fp32(total.device.type, right.dtype):
        torch.addmm(total, left, right, total.dtype, beta=beta, out=total)
    elif add:
        total.add_(left @ right)
    else:
        total.copy_(left @ right)


@cache
def accumulates_in_fp32(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether one kernel of the device multiplies this dtype and adds to an fp32 sum.

    Some releases of torch refuse an fp32 sum, for ROCm or also for CUDA. Hence a small product is
    computed, once per process.
    """
    if device_type == "cpu":
        return False
    ones = torch.ones(8, 8, dtype=dtype, device=device_type)
    total = torch.full((8, 8), 2.0**-20, dtype=torch.float32, device=device_type)
    try:
        torch.addmm(total, ones, ones, torch.float32, beta=1, out=total)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # TypeError: this release has no argument `out_dtype`
        return False
    return bool((total == 8 + 2.0**-20).all())
