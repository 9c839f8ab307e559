"""Numbers in fp64 that know how far rounding may move the result of a kernel from them.

A kernel rounds the results of its operations. With unit roundoff u (2^-24 in fp32, 2^-11 in fp16,
2^-8 in bf16), a rounded number x differs from the exact one by at most u |x|. The model of this
module is that of Higham and Mary (SIAM J. Sci. Comput. 41, 2019, A2815): these errors are
independent, and their mean is 0. An error between -u |x| and u |x| then has a variance of about
(u x)^2 / 3, and a reference carries the variance of its error through its formula to first order:

    rounding            + (u x)^2 / 3
    function f(x)       f'(x)^2 var(x)
    product x y         y^2 var(x) + x^2 var(y)
    sum s of n products + n (u^2 / 3) (s^2 + sum (x y)^2): the partial sums of data with mean 0 are
                        a random walk, of about this size
    sum of n numbers    + n (u^2 / 3) (sum |x|)^2: the partial sums of positive numbers

The bound of an element is SIGMAS standard deviations. It therefore follows from the format, from
the number of additions and from the magnitudes of the reference. No part of it is measured.

The matrix units of GPUs may cut off sums in fp32 instead of rounding them (Fasi et al., Numerical
behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7, 2021, e330). These errors have the same sign.
For n products in steps of at least 8, each cut off by at most 2 u, they add up to n u / 4 of a
partial sum. A partial sum is at most three times its root mean square, and a sixth of the result
counts as one standard deviation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIGMAS = 6.0
"""Standard deviations of an error that a correct kernel does not exceed. A normal error exceeds
them once in 5e8 numbers, and rounding errors are bounded."""
FP32 = 2.0**-24
"""Unit roundoff of fp32."""


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of a device in the number format of a run."""

    dtype: torch.dtype
    truncates: bool = False
    """Whether sums of products may be cut off: on a GPU in 16 bits."""
    operands: float = 0.0
    """Unit roundoff to which the operands of products are rounded first (TF32), or 0."""
    adds_in_run: bool = False
    """Whether sums over tokens, of the gradients of norms, are kept in the format of the run, as
    torch's kernels for CPUs do in 16 bits."""
    splits: bool = False
    """Whether torch may add up parts of a product in the format of the run, its default on a GPU in
    16 bits (`allow_bf16_reduced_precision_reduction`)."""

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> "Arithmetic":
        """Return the roundings of a device, by torch's settings."""
        is_short, on_gpu = dtype != torch.float32, device.type != "cpu"
        has_tf32 = torch.get_float32_matmul_precision() != "highest"
        settings = torch.backends.cuda.matmul
        reduced = (
            settings.allow_bf16_reduced_precision_reduction,
            settings.allow_fp16_reduced_precision_reduction,
        )[dtype == torch.float16]
        return cls(
            dtype,
            truncates=is_short and on_gpu,
            operands=2.0**-11 if has_tf32 and not is_short and on_gpu else 0.0,
            adds_in_run=is_short and not on_gpu,
            splits=bool(reduced) and is_short and on_gpu,
        )

    @property
    def run(self) -> float:
        """Unit roundoff of the format of the run."""
        return unit_roundoff(self.dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance of 1 to the next number of a format."""
    return torch.finfo(dtype).eps / 2


class Number(NamedTuple):
    """A tensor of exact results, and of the variances of a kernel's errors."""

    value: Tensor
    """fp64, on the host."""
    variance: Tensor
    """fp64, in a shape that broadcasts to that of `value`."""

    @classmethod
    def exact(cls, tensor: Any) -> "Number":
        """Return numbers that a kernel gets as they are."""
        value = torch.as_tensor(tensor).detach().cpu().double()
        return cls(value, torch.zeros((), dtype=torch.float64))

    def round(self, unit: float = FP32, times: int = 1) -> "Number":
        """Return the numbers after one or several roundings.

        The numbers of fp16 below 2^-14 have the same distance, 2^-24.
        """
        floor = 2.0**-25 if unit == unit_roundoff(torch.float16) else 0.0
        errors = (unit * self.value).square() + floor**2
        return Number(self.value, self.variance + times * errors / 3)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Number":
        """Return an elementwise function of the numbers, exactly computed."""
        x = self.value.clone().requires_grad_()
        with torch.enable_grad():
            y = function(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
        return Number(y.detach(), slope.square() * self.variance)

    def view(self, change: Callable[[Tensor], Tensor]) -> "Number":
        """Return the numbers in another order or shape."""
        return Number(change(self.value), change(self.variance.expand(self.value.shape)))

    def columns(self, first: int, stop: int | None) -> "Number":
        """Return a range of the last dim."""
        return self.view(lambda t: t[..., first:stop])

    def times(self, other: "Number | Tensor | float") -> "Number":
        """Return the products, exactly computed."""
        y = other if isinstance(other, Number) else Number.exact(other)
        variance = self.variance * y.value.square() + self.value.square() * y.variance
        return Number(self.value * y.value, variance)

    def plus(self, other: "Number | Tensor | float") -> "Number":
        """Return the sums, exactly computed."""
        y = other if isinstance(other, Number) else Number.exact(other)
        return Number(self.value + y.value, self.variance + y.variance)

    def minus(self, other: "Number | Tensor | float") -> "Number":
        """Return the differences, exactly computed."""
        y = other if isinstance(other, Number) else Number.exact(other)
        return self.plus(Number(-y.value, y.variance))

    def sum(self, dim: int, unit: float = FP32, *, random: bool = False) -> "Number":
        """Return the sums over a dim, which stays with one element.

        `unit` is the roundoff of partial sums. With `random` the numbers have mean 0.
        """
        count, x = self.value.shape[dim], self.value
        total, variance = x.sum(dim, True), self.variance.expand(x.shape).sum(dim, True)
        scale = x.abs().sum(dim, True).square()
        if random:
            scale = total.square() + x.square().sum(dim, True)
        return Number(total, variance + count * unit**2 / 3 * scale)

    def product(self, other: "Number", arithmetic: Arithmetic) -> "Number":
        """Return the matrix products, summed in fp32."""
        x, y = self, other
        total = x.value @ y.value
        squares = total.square() + x.value.square() @ y.value.square()
        count, variance = x.value.shape[-1], torch.zeros_like(squares)
        if x.variance.any():
            variance += x.variance.expand(x.value.shape) @ y.value.square()
        if y.variance.any():
            variance += x.value.square() @ y.variance.expand(y.value.shape)
        share = count * FP32**2 / 3 + 2 * arithmetic.operands**2 / 3
        if arithmetic.truncates:
            share += (count * FP32 / 4 * 3 / SIGMAS) ** 2
        if arithmetic.splits:  # into at most 16 parts, each rounded once
            share += 16 * arithmetic.run**2 / 3
        return Number(total, variance + share * squares)

    @property
    def bound(self) -> Tensor:
        """The largest error of a correct kernel, for each element."""
        return SIGMAS * self.variance.expand(self.value.shape).sqrt()
